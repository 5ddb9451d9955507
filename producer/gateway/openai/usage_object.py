"""Token counts in OpenAI's words."""

from __future__ import annotations

from typing import Any

from penstock.shared.protocol import Usage

__all__ = ["usage_object"]


def usage_object(usage: Usage) -> dict[str, Any]:
    """The ``usage`` of an answer; generated tokens include candidates that are not shown."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }

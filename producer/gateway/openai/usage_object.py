"""Token counts in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.shared.protocol.events import Usage

__all__ = ["sum_of_usages", "usage_object"]


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """The ``usage`` of an answer; generated tokens include candidates that are not shown.

    Args:
        usage: what the worker counted.
        reasoning_tokens: how many of the generated tokens brought reasoning; None for an answer
            that is not taken apart.
    """
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def sum_of_usages(
    usages: Sequence[Usage | None], reasoning_tokens: int | None = None
) -> dict[str, Any] | None:
    """The ``usage`` of an answer to several prompts; None if one is not known."""
    known = [usage for usage in usages if usage is not None]
    if len(known) < len(usages):
        return None
    return usage_object(
        Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in known),
            output_tokens=sum(usage.output_tokens for usage in known),
            cached_tokens=sum(usage.cached_tokens for usage in known),
        ),
        reasoning_tokens,
    )

"""Schemas of the answers, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CHAT_ANSWER", "COMPLETION_ANSWER"]

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_REASON = {"enum": ["stop", "length", "tool_calls", "content_filter", "function_call"]}

_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": _COUNT}},
        "completion_tokens_details": {
            "type": "object",
            "properties": {"reasoning_tokens": _COUNT},
        },
    },
}


def _answer(object_name: str, choice: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    choices = {
        "type": "object",
        "required": ["index", "logprobs", "finish_reason", *required],
        "properties": {
            "index": _COUNT,
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": _REASON,
            **choice,
        },
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": _STRING,
            "object": {"const": object_name},
            "created": _COUNT,
            "model": _STRING,
            "service_tier": {"enum": ["default", "flex", "priority"]},
            "choices": {"type": "array", "minItems": 1, "items": choices},
            "usage": _USAGE,
        },
    }


_MESSAGE = {
    "type": "object",
    "required": ["role", "content", "refusal"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": {"type": ["string", "null"]},
        "reasoning_content": _STRING,
        "tool_calls": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    },
}

CHAT_ANSWER: Mapping[str, Any] = _answer("chat.completion", {"message": _MESSAGE}, ["message"])
COMPLETION_ANSWER: Mapping[str, Any] = _answer("text_completion", {"text": _STRING}, ["text"])

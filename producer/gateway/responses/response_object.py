"""The response object, as a pure function of the request's note, its state and its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason, State

from ...results import Result
from ..api_errors import ApiError, end_error
from .output_items import OutputItems
from .response_fields import RESPONSE_FIELDS

__all__ = ["ResponseHead", "ended_object", "refusal_of", "response_object"]

_STATUS = {
    State.QUEUED: "queued",
    State.RUNNING: "in_progress",
    State.COMPLETED: "completed",
    State.CANCELLED: "cancelled",
}
"""Every other state is ``failed``."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What never changes of a response.

    Attributes:
        id: its id, which is that of its request.
        created: when it was accepted, in seconds since 1970.
        model: the model's name.
        tier: the service tier that was used.
        echoed: fields of the body that the object repeats.
    """

    id: str
    created: int
    model: str
    tier: str
    echoed: dict[str, Any]

    @property
    def background(self) -> bool:
        """Whether the client asked for a response that it fetches later."""
        return bool(self.echoed.get("background"))


def response_object(
    head: ResponseHead,
    state: State,
    end: End | None = None,
    items: Iterable[Mapping[str, Any]] = (),
    reasoning_tokens: int = 0,
) -> dict[str, Any]:
    """The object of a response.

    Args:
        head: what never changes.
        state: the request's state.
        end: its end, once it has one.
        items: its output, once it has ended.
        reasoning_tokens: how many tokens of that are reasoning.
    """
    status, details, error = _outcome(state, end)
    echoed = head.echoed
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": head.background,
        "error": error,
        "incomplete_details": details,
        "instructions": echoed.get("instructions"),
        "max_output_tokens": echoed.get("max_output_tokens"),
        "metadata": echoed.get("metadata") or {},
        "model": head.model,
        "output": list(items),
        "parallel_tool_calls": echoed.get("parallel_tool_calls", True),
        "previous_response_id": echoed.get("previous_response_id"),
        "reasoning": echoed.get("reasoning"),
        "service_tier": head.tier,
        "store": echoed.get("store", True),
        "temperature": echoed.get("temperature", 1.0),
        "text": echoed.get("text") or {"format": {"type": "text"}},
        "tool_choice": echoed.get("tool_choice", "auto"),
        "tools": echoed.get("tools", []),
        "top_p": echoed.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": _usage(end, reasoning_tokens),
    }


def ended_object(head: ResponseHead, result: Result) -> dict[str, Any]:
    """The object of a response that has ended."""
    items = OutputItems.of(head.id, result.choices[0].deltas, result.end)
    return response_object(head, result.state, result.end, items.objects(), items.reasoning_tokens)


def refusal_of(end: End) -> ApiError | None:
    """What a client is told that waits for a request which was refused before its first token.

    Returns:
        An error with status 400; None for every other end, which is a response.
    """
    error = _end_error(end) if end.n == 0 else None
    return error if error is not None and error.status == 400 else None


def _end_error(end: End) -> ApiError | None:
    return end_error(end, RESPONSE_FIELDS.names, RESPONSE_FIELDS.prompt)


def _outcome(
    state: State, end: End | None
) -> tuple[str, dict[str, str] | None, dict[str, str] | None]:
    """Status, ``incomplete_details`` and ``error``."""
    status = _STATUS.get(state, "failed")
    if end is None:
        return status, None, None
    if end.reason is Reason.LENGTH:
        return "incomplete", {"reason": "max_output_tokens"}, None
    if status != "failed":
        return status, None, None
    refusal = _end_error(end)
    message = "the request failed" if refusal is None else refusal.message
    wrong = refusal is not None and refusal.status == 400
    return status, None, {"code": "invalid_prompt" if wrong else "server_error", "message": message}


def _usage(end: End | None, reasoning_tokens: int) -> dict[str, Any] | None:
    usage = None if end is None else end.usage
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }

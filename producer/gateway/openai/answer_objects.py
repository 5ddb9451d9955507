"""Whole answers of chat and completions as objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...choices import Choice
from ...results import Result
from ..api_errors import end_error
from .answer_form import AnswerForm
from .chat_deltas import chat_message, has_call
from .event_writers import FINISH_REASONS, AnswerHead
from .fields.field_table import FieldTable
from .token_logprobs import TokenNames
from .usage_object import usage_object

__all__ = ["answer_object", "chat_choice", "completion_choice"]


def answer_object(
    head: AnswerHead,
    form: AnswerForm,
    object_name: str,
    result: Result,
    fields: FieldTable,
    choice: Callable[[AnswerHead, AnswerForm, Choice, TokenNames], dict[str, Any]],
    names: TokenNames,
) -> bytes:
    """The body of an answer.

    Raises:
        ApiError: the request was not completed.
    """
    error = end_error(result.end, fields.names, fields.prompt)
    if error is not None:
        raise error
    answer = {
        "id": head.id,
        "object": object_name,
        "created": head.created,
        "model": head.model,
        "service_tier": form.tier,
        "choices": [choice(head, form, item, names) for item in result.choices],
        "usage": None if result.usage is None else usage_object(result.usage),
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def chat_choice(
    head: AnswerHead, form: AnswerForm, choice: Choice, names: TokenNames
) -> dict[str, Any]:
    """One of ``choices`` of a chat completion."""
    logprobs = names.chat(choice.token_ids, choice.logprobs)
    common = _common(form, choice, logprobs)
    if has_call(choice.deltas) and common["finish_reason"] == "stop":
        common["finish_reason"] = "tool_calls"
    message = chat_message(head.id, choice, form.reasoning_field)
    return {"index": choice.index, "message": message, **common}


def completion_choice(
    head: AnswerHead, form: AnswerForm, choice: Choice, names: TokenNames
) -> dict[str, Any]:
    """One of ``choices`` of a completion, behind the prompt if that is echoed."""
    del head
    logprobs = names.completion(choice.token_ids, choice.logprobs, len(form.echo))
    text = form.echo + choice.text
    return {"index": choice.index, "text": text, **_common(form, choice, logprobs)}


def _common(form: AnswerForm, choice: Choice, logprobs: object) -> dict[str, Any]:
    reason = None if choice.reason is None else FINISH_REASONS[choice.reason]
    ids = {"token_ids": choice.token_ids} if form.token_ids else {}
    return {"logprobs": logprobs, "finish_reason": reason, **ids}

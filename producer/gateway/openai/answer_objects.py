"""Whole answers of chat and completions as objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from penstock.shared.protocol.events import TokenLogprobs

from ...choices import Choice
from ...results import Result
from ..api_errors import end_error
from .answer_form import AnswerForm
from .chat_deltas import chat_message, has_call
from .event_writers import FINISH_REASONS, AnswerHead
from .fields.field_table import FieldTable
from .token_logprobs import TokenNames
from .usage_object import sum_of_usages

__all__ = ["MakeChoice", "answer_object", "chat_choice", "completion_choice"]

OfPrompt = Sequence[TokenLogprobs | None]
MakeChoice = Callable[[AnswerHead, AnswerForm, Choice, TokenNames, OfPrompt], dict[str, Any]]
"""Makes one of ``choices``, given the log-probabilities of the prompt's tokens."""


def answer_object(
    head: AnswerHead,
    forms: Sequence[AnswerForm],
    object_name: str,
    results: Sequence[Result],
    fields: FieldTable,
    choice: MakeChoice,
    names: TokenNames,
) -> bytes:
    """The body of an answer.

    Args:
        head: what stands in every answer.
        forms: what the client asked to see, for each prompt.
        object_name: of the endpoint.
        results: for each prompt; choices are counted through all of them.
        fields: of the endpoint, for names in errors.
        choice: makes one of ``choices``.
        names: of the model's tokens.

    Raises:
        ApiError: a request was not completed.
    """
    choices: list[dict[str, Any]] = []
    reasoning_tokens = 0
    for form, result in zip(forms, results, strict=False):
        error = end_error(result.end, fields.names, fields.prompt)
        if error is not None:
            raise error
        first = len(choices)
        for item in result.choices:
            made = choice(head, form, item, names, result.prompt_logprobs)
            choices.append({**made, "index": first + item.index})
            reasoning_tokens += item.reasoning_tokens
    is_parsed = choice is chat_choice
    answer = {
        "id": head.id,
        "object": object_name,
        "created": head.created,
        "model": head.model,
        "service_tier": forms[0].tier,
        "choices": choices,
        "usage": sum_of_usages(
            [result.usage for result in results], reasoning_tokens if is_parsed else None
        ),
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def chat_choice(
    head: AnswerHead, form: AnswerForm, choice: Choice, names: TokenNames, of_prompt: OfPrompt
) -> dict[str, Any]:
    """One of ``choices`` of a chat completion."""
    del of_prompt
    logprobs = names.chat(choice.token_ids, choice.logprobs)
    common = _common(form, choice, logprobs)
    if has_call(choice.deltas) and common["finish_reason"] == "stop":
        common["finish_reason"] = "tool_calls"
    message = chat_message(head.id, choice, form.reasoning_field)
    return {"index": choice.index, "message": message, **common}


def completion_choice(
    head: AnswerHead, form: AnswerForm, choice: Choice, names: TokenNames, of_prompt: OfPrompt
) -> dict[str, Any]:
    """One of ``choices`` of a completion, behind the prompt if that is echoed."""
    del head
    ids, reports = choice.token_ids, cast(OfPrompt, choice.logprobs)
    if form.echo_ids:
        ids, reports = (*form.echo_ids, *ids), (*of_prompt, *reports)
    logprobs = names.completion(ids, reports, 0)
    text = form.echo + choice.text
    return {"index": choice.index, "text": text, **_common(form, choice, logprobs)}


def _common(form: AnswerForm, choice: Choice, logprobs: object) -> dict[str, Any]:
    reason = None if choice.reason is None else FINISH_REASONS[choice.reason]
    ids = {"token_ids": choice.token_ids} if form.token_ids else {}
    return {"logprobs": logprobs, "finish_reason": reason, **ids}

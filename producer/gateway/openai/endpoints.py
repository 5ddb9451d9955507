"""``POST /v1/chat/completions`` and ``POST /v1/completions``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...results import Result, Status
from ..answering.answers import EventWriter
from ..answering.prepared_answer import PreparedAnswer
from ..answering.request_ids import IdPrefix
from ..answering.stored_answers import MakeWriter
from ..gateway import Gateway, Submission
from ..model_directory import Shard
from ..pages.documented import json_answer, json_body, with_errors
from .answer_form import AnswerForm
from .answer_objects import MakeChoice, answer_object, chat_choice, completion_choice
from .answer_schemas import CHAT_ANSWER, COMPLETION_ANSWER
from .event_writers import AnswerHead, ChatWriter, CompletionWriter
from .fields.chat_fields import CHAT_FIELDS, chat_request
from .fields.common_fields import service_tier, wants_usage
from .fields.completion_fields import (
    COMPLETION_FIELDS,
    completion_requests,
    echoed_text,
    needs_prompt_tokens,
)
from .fields.field_schema import body_schema
from .fields.field_table import FieldTable
from .prompt_tokens import prompt_tokens
from .token_logprobs import TokenNames

__all__ = ["openai_routes", "openai_writers"]


def openai_routes(gateway: Gateway) -> APIRouter:
    """The routes of both endpoints."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        responses=with_errors(json_answer("The answer.", CHAT_ANSWER, events=True), body=True),
        openapi_extra=json_body(body_schema(CHAT_FIELDS)),
    )
    async def create_chat_completion(request: Request) -> Response:
        body = await gateway.read_object(request)
        own, values = CHAT_FIELDS.read(body)
        default = gateway.settings.default_max_tokens
        fields = chat_request(own, values, default)
        return await _answer(gateway, request, _CHAT, body, own, [fields])

    @router.post(
        "/v1/completions",
        responses=with_errors(
            json_answer("The answer.", COMPLETION_ANSWER, events=True), body=True
        ),
        openapi_extra=json_body(body_schema(COMPLETION_FIELDS)),
    )
    async def create_completion(request: Request) -> Response:
        body = await gateway.read_object(request)
        own, values = COMPLETION_FIELDS.read(body)
        prompts = completion_requests(own, values)
        return await _answer(gateway, request, _COMPLETION, body, own, prompts)

    return router


class _Endpoint:
    """What differs between the two.

    Attributes:
        name: in notes.
        prefix: how ids begin.
        object_name: of a whole answer.
        fields: the fields of its body.
        writer: makes its events.
        choice: makes one of ``choices`` of a whole answer.
    """

    def __init__(
        self,
        name: str,
        prefix: IdPrefix,
        object_name: str,
        fields: FieldTable,
        writer: Callable[..., ChatWriter | CompletionWriter],
        choice: MakeChoice,
    ) -> None:
        self.name = name
        self.prefix = prefix
        self.object_name = object_name
        self.fields = fields
        self.writer = writer
        self.choice = choice


_CHAT = _Endpoint("chat", IdPrefix.CHAT, "chat.completion", CHAT_FIELDS, ChatWriter, chat_choice)
_COMPLETION = _Endpoint(
    "completion",
    IdPrefix.COMPLETION,
    "text_completion",
    COMPLETION_FIELDS,
    CompletionWriter,
    completion_choice,
)


async def _answer(
    gateway: Gateway,
    request: Request,
    endpoint: _Endpoint,
    body: Mapping[str, Any],
    own: Mapping[str, Any],
    prompts: Sequence[dict[str, Any]],
) -> Response:
    """Answer with the output of a request for each prompt."""
    submit = functools.partial(_submit_all, gateway, request, endpoint, body, own, prompts)
    if any(_needs_prompt_tokens(endpoint, own, fields) for fields in prompts):
        streams = bool(own.get("stream"))
        return PreparedAnswer(submit, answers=gateway.answers, streams=streams)
    return await submit()


async def _submit_all(
    gateway: Gateway,
    request: Request,
    endpoint: _Endpoint,
    body: Mapping[str, Any],
    own: Mapping[str, Any],
    prompts: Sequence[dict[str, Any]],
) -> Response:
    """Submit a request for each prompt and answer with their output."""
    # Workers tell all prompts' tokens first: a submitted request has no reader until its answer is.
    forms = [
        await _form(gateway, request, endpoint, own, fields, number)
        for number, fields in enumerate(prompts)
    ]
    submissions: list[Submission] = []
    try:
        for number, (fields, form) in enumerate(zip(prompts, forms, strict=True)):
            submissions.append(
                await _submit(gateway, request, endpoint, body, own, fields, form, number)
            )
        has_logprobs = "logprobs" in prompts[0]
        names = TokenNames(await submissions[0].shard.vocabulary() if has_logprobs else ())
    except BaseException:
        await gateway.give_up(submissions)
        raise
    submission, form = submissions[0], forms[0]
    head = AnswerHead(submission.id, submission.accepted_at // 1000, submission.model)
    if own.get("stream"):
        writer = endpoint.writer(head, form, endpoint.fields, names, submission.start)
        return gateway.stream(submission, writer, reads_all=form.reads_all)

    def build(results: Sequence[Result]) -> bytes:
        kind, table = endpoint.object_name, endpoint.fields
        return answer_object(head, forms, kind, results, table, endpoint.choice, names)

    return gateway.joined(submissions, build)


def _needs_prompt_tokens(
    endpoint: _Endpoint, own: Mapping[str, Any], fields: Mapping[str, Any]
) -> bool:
    """Whether a worker must tell the prompt's tokens before the request is submitted."""
    _, continuous = wants_usage(own)
    return continuous or (endpoint is _COMPLETION and needs_prompt_tokens(own, fields))


async def _form(
    gateway: Gateway,
    request: Request,
    endpoint: _Endpoint,
    own: Mapping[str, Any],
    fields: dict[str, Any],
    number: int,
) -> AnswerForm:
    """What the client asked to see; a prompt whose tokens must be known becomes these tokens."""
    _, tier = service_tier(own)
    usage, continuous = wants_usage(own)
    form = AnswerForm(
        tier=tier,
        several=fields.get("n", 1) > 1,
        usage=usage,
        token_ids=bool(own.get("return_token_ids")),
        reasoning_field=gateway.settings.reasoning_field,
        reads_all=("tools" in fields or usage) if endpoint is _CHAT else "logprobs" in fields,
    )
    echoes = endpoint is _COMPLETION and needs_prompt_tokens(own, fields)
    if not echoes and not continuous:
        return replace(form, echo=echoed_text(own, fields))
    prompt = await prompt_tokens(gateway, request, endpoint.fields, own, fields, number)
    if continuous:
        form = replace(form, prompt_tokens=len(prompt.token_ids))
    if not echoes:
        return replace(form, echo=echoed_text(own, fields))
    given = fields["prompt"]
    fields["prompt"] = prompt.token_ids
    text = given if isinstance(given, str) else prompt.text
    return replace(form, echo=text, echo_ids=prompt.token_ids if "logprobs" in fields else ())


async def _submit(
    gateway: Gateway,
    request: Request,
    endpoint: _Endpoint,
    body: Mapping[str, Any],
    own: Mapping[str, Any],
    fields: Mapping[str, Any],
    form: AnswerForm,
    number: int,
) -> Submission:
    lane, _ = service_tier(own)
    return await gateway.submit(
        request,
        endpoint.fields,
        prefix=endpoint.prefix,
        model=own.get("model"),
        lane=lane,
        fields=fields,
        note={"endpoint": endpoint.name, "logprobs": "logprobs" in fields, **form.to_note()},
        body=body,
        number=number,
    )


async def _writer_of(
    endpoint: _Endpoint, shard: Shard, status: Status, note: dict[str, Any], start: int
) -> tuple[EventWriter, int]:
    head = AnswerHead(status.id, (status.accepted_at or 0) // 1000, shard.keys.model)
    form = AnswerForm.from_note(note)
    names = TokenNames(await shard.vocabulary() if note.get("logprobs") else ())
    writer = endpoint.writer(head, form, endpoint.fields, names, start)
    return writer, 0 if form.reads_all else start


def openai_writers() -> dict[str, MakeWriter]:
    """What makes the events of these endpoints' requests again, by name."""
    return {one.name: functools.partial(_writer_of, one) for one in (_CHAT, _COMPLETION)}

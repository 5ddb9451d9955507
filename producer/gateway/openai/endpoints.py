"""``POST /v1/chat/completions`` and ``POST /v1/completions``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...choices import Choice
from ..api_errors import invalid
from ..gateway import Gateway
from .answer_objects import answer_object, chat_choice, completion_choice
from .chat_fields import CHAT_FIELDS, chat_request
from .common_fields import service_tier, wants_usage
from .completion_fields import COMPLETION_FIELDS, completion_request
from .event_writers import AnswerHead, ChatWriter, CompletionWriter
from .field_table import FieldTable

__all__ = ["openai_routes"]


def openai_routes(gateway: Gateway) -> APIRouter:
    """The routes of both endpoints."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        own, values = CHAT_FIELDS.read(await gateway.read_object(request))
        default = gateway.settings.default_max_tokens
        fields = chat_request(own, values, default)
        choice = functools.partial(chat_choice, token_ids=bool(own.get("return_token_ids")))
        return await _answer(gateway, request, CHAT, own, fields, choice)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        own, values = COMPLETION_FIELDS.read(await gateway.read_object(request))
        fields = completion_request(own, values)
        echo = fields["prompt"] if own.get("echo") else ""
        if not isinstance(echo, str):
            raise invalid("echo", "echo: needs a prompt given as text", "unsupported_value")
        ids = bool(own.get("return_token_ids"))
        choice = functools.partial(completion_choice, token_ids=ids, echo=echo)
        return await _answer(gateway, request, COMPLETION, own, fields, choice)

    return router


class _Endpoint:
    """What differs between the two.

    Attributes:
        prefix: how ids begin.
        object_name: of a whole answer.
        fields: the fields of its body.
        writer: makes its events.
    """

    def __init__(
        self,
        prefix: str,
        object_name: str,
        fields: FieldTable,
        writer: Callable[..., ChatWriter | CompletionWriter],
    ) -> None:
        self.prefix = prefix
        self.object_name = object_name
        self.fields = fields
        self.writer = writer


CHAT = _Endpoint("chatcmpl-", "chat.completion", CHAT_FIELDS, ChatWriter)
COMPLETION = _Endpoint("cmpl-", "text_completion", COMPLETION_FIELDS, CompletionWriter)


async def _answer(
    gateway: Gateway,
    request: Request,
    endpoint: _Endpoint,
    own: Mapping[str, Any],
    fields: dict[str, Any],
    choice: Callable[[Choice], dict[str, Any]],
) -> Response:
    """Submit the request and answer with its output."""
    if "logprobs" in fields:
        raise invalid("logprobs", "logprobs: is not served yet", "unsupported_parameter")
    lane, tier = service_tier(own)
    usage = wants_usage(own)
    submission = await gateway.submit(
        request,
        endpoint.fields,
        prefix=endpoint.prefix,
        model=own.get("model"),
        lane=lane,
        fields=fields,
    )
    head = AnswerHead(submission.id, int(time.time()), submission.model, tier)
    if own.get("stream"):
        ids = bool(own.get("return_token_ids"))
        writer = endpoint.writer(head, endpoint.fields, usage=usage, token_ids=ids)
        return gateway.stream(submission, writer)
    build = functools.partial(_build, head, endpoint, choice)
    return gateway.whole(submission, build)


def _build(
    head: AnswerHead,
    endpoint: _Endpoint,
    choice: Callable[[Choice], dict[str, Any]],
    result: Any,
) -> bytes:
    return answer_object(head, endpoint.object_name, result, endpoint.fields, choice)

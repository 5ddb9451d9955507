"""``/tokenize`` and ``/detokenize``, as vLLM has them: a worker answers, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.protocol.fields.collection_types import TokenIds
from penstock.shared.protocol.request import MAX_PROMPT_TOKENS
from penstock.shared.protocol.states import Lane

from ...results import Result
from ..answering.request_ids import IdPrefix
from ..api_errors import end_error, invalid
from ..gateway import Gateway
from ..openai.fields.chat_fields import read_messages
from ..openai.fields.common_fields import LIST, TEXT
from ..openai.fields.field_schema import body_schema
from ..openai.fields.field_table import FieldTable, served
from .documented import json_answer, json_body, with_errors

__all__ = ["tokenize_routes"]

_FIELDS = (
    served("model", TEXT, "Which model."),
    served("prompt", TEXT, "A text; or give `messages`."),
    served("messages", LIST, "A conversation, which the chat template renders."),
)
_TOKENIZE, _TOKENIZE_CHAT = (
    FieldTable(_FIELDS, prompt=name, required=("model",), either=("prompt", "messages"))
    for name in ("prompt", "messages")
)
_DETOKENIZE = FieldTable(
    (
        served("model", TEXT, "Which model."),
        served("tokens", TokenIds(MAX_PROMPT_TOKENS), "Token ids."),
    ),
    prompt="tokens",
)
_TOKENS = {"type": "object", "required": ["count", "tokens"]}
_TEXT = {"type": "object", "required": ["prompt"]}


def tokenize_routes(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post(
        "/tokenize",
        responses=with_errors(json_answer("The tokens.", _TOKENS), body=True),
        openapi_extra=json_body(body_schema(_TOKENIZE)),
    )
    async def tokenize(request: Request) -> Response:
        body = await gateway.read_object(request)
        own, _ = _TOKENIZE.read(body)
        if ("prompt" in own) == ("messages" in own):
            raise invalid("prompt", "prompt: give a prompt, or messages", "missing_value")
        if "prompt" in own:
            return await _answer(gateway, request, _TOKENIZE, body, own, own["prompt"], _tokens)
        messages = read_messages(own)
        return await _answer(gateway, request, _TOKENIZE_CHAT, body, own, messages, _tokens)

    @router.post(
        "/detokenize",
        responses=with_errors(json_answer("The text.", _TEXT), body=True),
        openapi_extra=json_body(body_schema(_DETOKENIZE)),
    )
    async def detokenize(request: Request) -> Response:
        body = await gateway.read_object(request)
        own, _ = _DETOKENIZE.read(body)
        if not own.get("tokens"):
            raise invalid("tokens", "tokens: give at least one token id", "missing_value")
        return await _answer(gateway, request, _DETOKENIZE, body, own, own["tokens"], _text)

    return router


async def _answer(
    gateway: Gateway,
    request: Request,
    table: FieldTable,
    body: dict[str, Any],
    own: dict[str, Any],
    prompt: object,
    shown: Callable[[Result], dict[str, Any]],
) -> Response:
    """Let a worker tokenize a prompt."""
    submission = await gateway.submit(
        request,
        table,
        prefix=IdPrefix.TOKENS,
        model=own.get("model"),
        lane=Lane.NORMAL,
        fields={"prompt": prompt, "tokenize": True, "max_tokens": 1},
        note={"endpoint": "tokenize"},
        body=body,
    )

    def build(result: Result) -> bytes:
        error = end_error(result.end, table.names, table.prompt)
        if error is not None:
            raise error
        return bytes(JSONResponse(shown(result)).body)

    return gateway.whole(submission, build)


def _tokens(result: Result) -> dict[str, Any]:
    return {"count": len(result.token_ids), "tokens": list(result.token_ids)}


def _text(result: Result) -> dict[str, Any]:
    return {"prompt": result.text}

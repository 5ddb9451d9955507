"""What a line's body asks for, and its answer: the gateway's endpoints without HTTP."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import InvalidRequest, PenstockError
from penstock.shared.protocol.request import Request

from ...gateway.api_errors import ApiError, api_error_of, end_error, error_of
from ...gateway.model_directory import check_model
from ...gateway.openai.answer_form import AnswerForm
from ...gateway.openai.answer_objects import (
    MakeChoice,
    answer_object,
    chat_choice,
    completion_choice,
)
from ...gateway.openai.encoders.encoder_endpoints import ENCODER_ENDPOINTS, EncoderEndpoint
from ...gateway.openai.event_writers import AnswerHead
from ...gateway.openai.fields.chat_fields import CHAT_FIELDS, chat_request
from ...gateway.openai.fields.completion_fields import (
    COMPLETION_FIELDS,
    completion_request,
    echoed_text,
)
from ...gateway.openai.fields.field_table import FieldTable
from ...gateway.openai.token_logprobs import TokenNames
from ...gateway.responses.input_items import check_calls, read_input
from ...gateway.responses.response_fields import (
    RESPONSE_FIELDS,
    echoed_fields,
    response_request,
)
from ...gateway.responses.response_object import ResponseHead, ended_object
from ...results import Result

__all__ = ["LineEndpoint", "LineRefused", "Translation", "line_endpoint"]

_DEFAULT_MAX_TOKENS = 4096
_TIER = "flex"
_NOT_IN_BATCHES = ("stream", "background", "previous_response_id")

_Fields = Mapping[str, Any]


class LineRefused(Exception):
    """A line asks for something that cannot be served.

    Attributes:
        code: a word for programs.
        param: the field at fault, if it is one.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Translation:
    """A body that can be served.

    Attributes:
        model: the model it names.
        fields: of the queue's request, ``prompt`` among them.
        respond: makes the ``response`` of the output line from the request's id and result, and
            from the model's token names, which only log-probabilities need.
    """

    model: str
    fields: dict[str, Any]
    respond: Callable[[str, Result, TokenNames], dict[str, Any]]


Respond = Callable[[str, Result, TokenNames], bytes]
"""Makes an answer's body of the request's id, its result, and the model's token names."""


@dataclass(frozen=True, slots=True)
class LineEndpoint:
    """An endpoint that lines may name.

    Attributes:
        table: the fields of its body.
        plan: makes, of the model's name and what :meth:`FieldTable.read` returns, the fields of the
            queue's request, and what answers.
    """

    table: FieldTable
    plan: Callable[[str, _Fields, _Fields], tuple[dict[str, Any], Respond]]

    def translate(self, body: dict[str, Any]) -> Translation:
        """Read a line's body.

        Raises:
            LineRefused: a field is wrong, or the endpoint does not serve it in a batch.
        """
        try:
            own, values = self.table.read(body)
            for name in _NOT_IN_BATCHES:
                if own.get(name):
                    raise LineRefused(
                        "unsupported_parameter", f"{name}: not in a batch", f"body.{name}"
                    )
            model = check_model(own.get("model"))
            fields, respond = self.plan(model, own, values)
            Request.build(id="line", **fields)
        except ApiError as error:
            param = None if error.param is None else f"body.{error.param}"
            raise LineRefused(error.code, error.message, param) from None
        except InvalidRequest as error:
            refused = error_of(error, self.table.names)
            raise LineRefused(refused.code, refused.message, f"body.{refused.param}") from None
        return Translation(model, fields, functools.partial(_respond, respond))


def _respond(
    respond: Respond, request_id: str, result: Result, names: TokenNames
) -> dict[str, Any]:
    try:
        status, body = 200, respond(request_id, result, names)
    except (ApiError, PenstockError) as error:
        shown = api_error_of(error)
        status, body = shown.status, shown.body()
    return {"status_code": status, "request_id": request_id, "body": json.loads(body)}


def line_endpoint(url: str) -> LineEndpoint:
    """The endpoint of a URL.

    Raises:
        InvalidRequest: batches cannot name it.
    """
    found = _ENDPOINTS.get(url)
    if found is None:
        raise InvalidRequest("endpoint", url, f"one of {', '.join(_ENDPOINTS)}")
    return found


def _generation(
    object_name: str,
    table: FieldTable,
    build: Callable[[_Fields, _Fields], dict[str, Any]],
    choice: MakeChoice,
) -> LineEndpoint:
    """Chat and completions."""

    def plan(model: str, own: _Fields, values: _Fields) -> tuple[dict[str, Any], Respond]:
        fields = build(own, values)
        ids = bool(own.get("return_token_ids"))
        form = AnswerForm(tier=_TIER, token_ids=ids, echo=echoed_text(own, fields))

        def respond(request_id: str, result: Result, names: TokenNames) -> bytes:
            head = AnswerHead(request_id, int(time.time()), model)
            return answer_object(head, [form], object_name, [result], table, choice, names)

        return fields, respond

    return LineEndpoint(table, plan)


def _plan_response(model: str, own: _Fields, values: _Fields) -> tuple[dict[str, Any], Respond]:
    messages = read_input(own.get("input"))
    check_calls(messages)
    fields = response_request(own, values, messages, _DEFAULT_MAX_TOKENS)
    # The file holds the response; the gateway does not keep it.
    echoed = {**echoed_fields(own, values), "store": False}

    def respond(request_id: str, result: Result, names: TokenNames) -> bytes:
        del names
        error = end_error(result.end, RESPONSE_FIELDS.names, RESPONSE_FIELDS.prompt)
        if error is not None:
            raise error
        head = ResponseHead(request_id, int(time.time()), model, _TIER, echoed)
        return json.dumps(ended_object(head, result), ensure_ascii=False).encode()

    return fields, respond


def _plan_encoder(
    endpoint: EncoderEndpoint, model: str, own: _Fields, values: _Fields
) -> tuple[dict[str, Any], Respond]:
    del values
    payload = endpoint.payload(own)

    def respond(request_id: str, result: Result, names: TokenNames) -> bytes:
        del names
        return endpoint.answer(request_id, model, own, payload, result)

    return {"payload": payload}, respond


def _chat(own: _Fields, values: _Fields) -> dict[str, Any]:
    return chat_request(own, values, _DEFAULT_MAX_TOKENS)


_ENDPOINTS: Mapping[str, LineEndpoint] = {
    "/v1/chat/completions": _generation("chat.completion", CHAT_FIELDS, _chat, chat_choice),
    "/v1/completions": _generation(
        "text_completion", COMPLETION_FIELDS, completion_request, completion_choice
    ),
    "/v1/responses": LineEndpoint(RESPONSE_FIELDS, _plan_response),
    **{
        url: LineEndpoint(endpoint.table, functools.partial(_plan_encoder, endpoint))
        for url, endpoint in ENCODER_ENDPOINTS.items()
    },
}

"""What a line's body asks for, and its answer: the gateway's endpoints without HTTP."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import Request

from ...choices import Choice
from ...gateway.api_errors import ApiError, error_of
from ...gateway.model_directory import check_model
from ...gateway.openai.answer_form import AnswerForm
from ...gateway.openai.answer_objects import answer_object, chat_choice, completion_choice
from ...gateway.openai.event_writers import AnswerHead
from ...gateway.openai.fields.chat_fields import CHAT_FIELDS, chat_request
from ...gateway.openai.fields.completion_fields import (
    COMPLETION_FIELDS,
    completion_request,
    echoed_text,
)
from ...gateway.openai.fields.field_table import FieldTable
from ...gateway.openai.token_logprobs import TokenNames
from ...results import Result

__all__ = ["LineEndpoint", "LineRefused", "Translation", "line_endpoint"]

_DEFAULT_MAX_TOKENS = 4096
_TIER = "flex"


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


@dataclass(frozen=True, slots=True)
class LineEndpoint:
    """An endpoint that lines may name.

    Attributes:
        object_name: of its answers.
        table: the fields of its body.
        build: makes the queue's fields of those that :meth:`FieldTable.read` returns.
        choice: makes one of the answer's choices.
    """

    object_name: str
    table: FieldTable
    build: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    choice: Callable[[AnswerHead, AnswerForm, Choice, TokenNames], dict[str, Any]]

    def translate(self, body: dict[str, Any]) -> Translation:
        """Read a line's body.

        Raises:
            LineRefused: a field is wrong, or the endpoint does not serve it in a batch.
        """
        try:
            own, values = self.table.read(body)
            if own.get("stream"):
                raise LineRefused("unsupported_parameter", "stream: not in a batch", "body.stream")
            model = check_model(own.get("model"))
            fields = self.build(own, values)
            Request.build(id="line", **fields)
            ids = bool(own.get("return_token_ids"))
            form = AnswerForm(tier=_TIER, token_ids=ids, echo=echoed_text(own, fields))
        except ApiError as error:
            param = None if error.param is None else f"body.{error.param}"
            raise LineRefused(error.code, error.message, param) from None
        except InvalidRequest as error:
            refused = error_of(error, self.table.names)
            raise LineRefused(refused.code, refused.message, f"body.{refused.param}") from None
        return Translation(model, fields, functools.partial(self._respond, model, form))

    def _respond(
        self,
        model: str,
        form: AnswerForm,
        request_id: str,
        result: Result,
        names: TokenNames,
    ) -> dict[str, Any]:
        head = AnswerHead(request_id, int(time.time()), model)
        try:
            status = 200
            kind, table = self.object_name, self.table
            body = answer_object(head, form, kind, result, table, self.choice, names)
        except ApiError as error:
            status, body = error.status, error.body()
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


def _chat(own: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return chat_request(own, values, _DEFAULT_MAX_TOKENS)


_ENDPOINTS: Mapping[str, LineEndpoint] = {
    "/v1/chat/completions": LineEndpoint("chat.completion", CHAT_FIELDS, _chat, chat_choice),
    "/v1/completions": LineEndpoint(
        "text_completion", COMPLETION_FIELDS, completion_request, completion_choice
    ),
}

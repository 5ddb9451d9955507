"""Errors as OpenAI's API gives them: a status, and an object with message, type, param and code.

The status says what a client should do. OpenAI's clients retry 408, 409, 429 and every status from
500 on. So 409 is never used, and ``x-should-retry: false`` tells where another try would fail
alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from penstock.shared.errors import (
    IdConflict,
    InvalidRequest,
    PenstockError,
    ProtocolError,
    QueueFull,
    RedisUnavailable,
    StreamError,
    UnknownRequest,
)
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason, State

from ..batches.stores.storage import StorageError
from .monitoring.request_log import CLIENT_LEFT_STATUS

__all__ = [
    "MAX_RETRY_AFTER_S",
    "ApiError",
    "api_error_of",
    "end_error",
    "error_of",
    "error_response",
    "invalid",
    "response_of",
]

_log = logging.getLogger("penstock.gateway")

MAX_RETRY_AFTER_S = 120
"""OpenAI's clients do not retry at all when they are told to wait longer."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error with its HTTP status.

    Attributes:
        status: HTTP status.
        message: for a person.
        code: for a program; never a number.
        param: the field of the body at fault, None if it is not one field.
        retry_after_s: when to try again, in whole seconds; None does not say.
        retry: whether another try may succeed; None leaves that to the status.
        more_headers: what else the response says.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        retry: bool | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.retry = retry
        self.more_headers = more_headers or {}

    @property
    def type(self) -> str:
        """The kind of error, in OpenAI's words."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    def body(self) -> bytes:
        """The error object as JSON."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}, ensure_ascii=True).encode()

    def headers(self) -> dict[str, str]:
        """What the client's retries go by."""
        headers = dict(self.more_headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(min(max(1, self.retry_after_s), MAX_RETRY_AFTER_S))
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        return headers


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The error as a whole response."""
    return Response(
        error.body(),
        status_code=error.status,
        headers={**(headers or {}), **error.headers()},
        media_type="application/json",
    )


def response_of(error: BaseException) -> Response:
    """What a client is told of an error that its endpoint raised."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT_STATUS)
    return error_response(api_error_of(error))


def api_error_of(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Any error as its client is told of it; for ``names`` see :func:`error_of`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PenstockError):
        return error_of(error, names)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "an internal error", "internal_error")


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A body that is refused: 400."""
    return ApiError(400, message, code, param=param)


def error_of(error: PenstockError, names: Mapping[str, str] | None = None) -> ApiError:
    """What a client is told of an error of the queue.

    Args:
        error: the error.
        names: names of the queue's fields in the API; others keep theirs.
    """
    if isinstance(error, ProtocolError):  # what a worker wrote, not what a client did
        _log.error("%s", error)
        return ApiError(500, f"the answer cannot be shown: {error}", "invalid_answer")
    if isinstance(error, InvalidRequest):
        return _invalid_field(error, names or {})
    if isinstance(error, QueueFull):
        wait_s = -(-error.retry_after_ms // 1000)
        return ApiError(429, str(error), "queue_full", retry_after_s=wait_s)
    if isinstance(error, IdConflict):
        message = (
            "this Idempotency-Key was used with another body, or at another endpoint; "
            "use a new key, or send exactly the same request to join the first one"
        )
        return ApiError(422, message, "idempotency_key_reused", retry=False)
    if isinstance(error, RedisUnavailable):
        _log.warning("%s", error)
        return ApiError(503, "the queue is not available now", "queue_unavailable", retry_after_s=2)
    if isinstance(error, StorageError):
        _log.warning("%s", error)
        message = "the storage of files does not work now"
        return ApiError(503, message, "storage_unavailable", retry_after_s=5)
    if isinstance(error, UnknownRequest):
        return ApiError(404, str(error), "request_not_found")
    if isinstance(error, StreamError):
        return ApiError(410, str(error), "stream_lost", retry=False)
    return ApiError(500, "an internal error", "internal_error")


def _invalid_field(error: InvalidRequest, names: Mapping[str, str]) -> ApiError:
    param = _api_name(error.field, names)
    return invalid(param, f"{param}: got {error.value}; allowed: {error.allowed}")


def _api_name(field: str, names: Mapping[str, str]) -> str:
    """``prompt[0].content`` as ``messages[0].content``, where the prompt is called messages."""
    ends = [at for mark in ".[" if (at := field.find(mark)) >= 0]
    top = field[: min(ends)] if ends else field
    return names.get(top, top) + field[len(top) :]


_ENDS: Mapping[Reason, tuple[int, str, bool | None]] = {
    Reason.INVALID: (400, "invalid_request", None),
    Reason.QUEUE_FULL: (429, "queue_full", None),
    Reason.PROMPT_TOO_LONG: (400, "context_length_exceeded", None),
    Reason.OUT_OF_MEMORY: (400, "out_of_memory", None),
    Reason.ENGINE_ERROR: (500, "engine_error", None),
    Reason.MODEL_CHANGED: (503, "model_changed", None),
    Reason.CLIENT: (410, "request_cancelled", False),
    Reason.DISCONNECTED: (410, "request_cancelled", False),
    Reason.DEADLINE: (504, "deadline_exceeded", False),
    Reason.QUEUE_TIMEOUT: (503, "queue_timeout", None),
    Reason.POISON: (500, "request_crashes_workers", False),
    Reason.ATTEMPTS: (500, "too_many_attempts", False),
}


def end_error(end: End, names: Mapping[str, str], prompt: str) -> ApiError | None:
    """What a client is told of a request that ended; None if it was completed.

    Args:
        end: its end.
        names: names of the queue's fields in the API.
        prompt: name of the field that holds the prompt.
    """
    if end.state is State.COMPLETED:
        return None
    status, code, retry = _ENDS.get(end.reason, (500, end.reason.value, None))
    message = end.message or f"the request ended {end.state.value} ({end.reason.value})"
    param = None
    if end.reason is Reason.INVALID:
        field, found, _ = message.partition(": ")
        if found and " " not in field:
            param = _api_name(field, names)
            message = param + message[len(field) :]
    elif end.reason is Reason.PROMPT_TOO_LONG:
        param = prompt
    retry_after_s = 5 if end.reason in (Reason.QUEUE_TIMEOUT, Reason.QUEUE_FULL) else None
    return ApiError(status, message, code, param=param, retry_after_s=retry_after_s, retry=retry)

"""What ``/openapi.json`` says of answers: the error object everywhere, and each route's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["json_answer", "json_body", "with_errors"]

_STRING_OR_NULL = {"type": ["string", "null"]}

_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _STRING_OR_NULL,
                "code": _STRING_OR_NULL,
            },
        }
    },
}

_DESCRIPTIONS = {
    400: "The request is wrong; `param` says where.",
    401: "No valid API key.",
    403: "The API key may not do this.",
    404: "No such model or request.",
    408: "The body did not come in time.",
    410: "The request was cancelled, or its output is gone.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    422: "The Idempotency-Key was used with another body, or at another endpoint.",
    429: "A limit is reached; `retry-after` says when to try again.",
    500: "The request failed.",
    503: "No worker, no queue, or the gateway ends; `retry-after` says when to try again.",
    504: "The request's deadline passed.",
}

_OF_READING = (401, 403, 404, 500, 503)


def with_errors(
    answer: Mapping[str, Any] | None = None, *, body: bool = False, statuses: tuple[int, ...] = ()
) -> dict[int | str, dict[str, Any]]:
    """The responses of a route, for FastAPI.

    Args:
        answer: the response with status 200.
        body: the route takes a body and submits a request: every error may come.
        statuses: further errors of the route.
    """
    wanted = tuple(_DESCRIPTIONS) if body else tuple(sorted({*_OF_READING, 422, *statuses}))
    errors: dict[int | str, dict[str, Any]] = {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"schema": dict(_ERROR)}},
        }
        for status in wanted
    }
    return errors if answer is None else {200: dict(answer), **errors}


def json_answer(description: str, schema: Mapping[str, Any], *, events: bool = False) -> Any:
    """A response with status 200: an object, or events where the request asks for them."""
    content: dict[str, Any] = {"application/json": {"schema": dict(schema)}}
    if events:
        # Without a schema: some tools take it for that of each event, others for that of all.
        content["text/event-stream"] = {}
    return {"description": description, "content": content}


def json_body(schema: Mapping[str, Any]) -> dict[str, Any]:
    """FastAPI's ``openapi_extra`` of a route with a JSON body."""
    content = {"application/json": {"schema": dict(schema)}}
    return {"requestBody": {"required": True, "content": content}}

"""Answers that exist already: read again from any event on, at any gateway, or cancelled.

A request's note says which endpoint it came through and what its client asked to see. Together with
the token log that decides every event.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.errors import InvalidRequest, PenstockError

from ...results import Status
from ..api_errors import ApiError, error_of
from ..gateway import Gateway
from ..model_directory import Shard
from ..pages.documented import with_errors
from .answers import EventWriter
from .event_ids import last_event_id

__all__ = ["MakeWriter", "note_of", "stream_routes"]

MakeWriter = Callable[[Shard, Status, dict[str, Any], int], Awaitable[tuple[EventWriter, int]]]
"""Makes the events of a request that is known, from its note, from an index on. Returns the writer,
and the token that it must be given first."""


def note_of(status: Status) -> dict[str, Any]:
    """The note of a request; empty if it did not come through a gateway."""
    try:
        note = json.loads(status.note) if status.note else {}
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def stream_routes(gateway: Gateway, writers: dict[str, MakeWriter]) -> APIRouter:
    """``/v1/streams/{id}``.

    Args:
        gateway: the gateway.
        writers: by endpoint, what makes the events of its requests.
    """
    router = APIRouter()

    @router.get(
        "/v1/streams/{request_id}",
        responses={
            200: {"description": "Events.", "content": {"text/event-stream": {}}},
            **with_errors(statuses=(400, 410, 429, 504)),
        },
    )
    async def read_stream(request: Request, request_id: str) -> Response:
        start = last_event_id(request, "from")
        shard, status = await _find(gateway, request, request_id)
        note = note_of(status)
        make_writer = writers.get(str(note.get("endpoint")))
        if make_writer is None:
            message = f"the request {request_id!r} did not come through a gateway"
            raise ApiError(404, message, "request_not_found")
        writer, first = await make_writer(shard, status, note, start)
        return gateway.replay(shard, status, writer, first)

    @router.delete("/v1/streams/{request_id}", responses=with_errors())
    async def cancel_stream(request: Request, request_id: str) -> Response:
        shard, status = await _find(gateway, request, request_id)
        reply = await shard.producer.cancel(status.id)
        return JSONResponse(
            {"id": status.id, "object": "stream", "cancelled": reply.changed},
            headers={"x-request-id": status.id},
        )

    return router


async def _find(gateway: Gateway, request: Request, request_id: str) -> tuple[Shard, Status]:
    """The request of this name, if it is the caller's own.

    Raises:
        ApiError: 404, it is not.
    """
    caller = await gateway.caller(request)
    try:
        found = await gateway.directory.locate(request_id)
    except InvalidRequest:
        found = None
    except PenstockError as error:
        raise error_of(error) from None
    if found is None or found[1].tenant != caller.tenant:
        message = f"the request {request_id[:128]!r} is not known, or its retention has passed"
        raise ApiError(404, message, "request_not_found")
    return found

"""``/v1/responses``: create, read, continue, cancel, delete."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.errors import InvalidRequest, PenstockError, UnknownRequest
from penstock.shared.protocol.states import TERMINAL_STATES, State

from ...results import Result, Status
from ..answering.answers import EventWriter
from ..answering.event_ids import last_event_id, read_index
from ..answering.request_ids import IdPrefix
from ..answering.stored_answers import MakeWriter, note_of
from ..api_errors import ApiError, error_of, invalid
from ..gateway import Gateway
from ..model_directory import Shard
from ..openai.fields.common_fields import service_tier
from ..openai.fields.field_schema import body_schema
from ..pages.documented import json_answer, json_body, with_errors
from .input_items import assistant_message, check_calls, input_items, read_input
from .response_events import ResponseWriter
from .response_fields import RESPONSE_FIELDS, echoed_fields, response_request
from .response_object import ResponseHead, ended_object, refusal_of, response_object

__all__ = ["response_routes", "response_writers"]

_ENDPOINT = "response"
_MAX_ITEMS = 100
_SCHEMA = {"type": "object", "required": ["id", "object", "status", "output"]}
_GONE = {"type": "object", "required": ["id", "object", "deleted"]}
_LIST = {"type": "object", "required": ["object", "data", "has_more"]}


def response_routes(gateway: Gateway) -> APIRouter:
    """The routes of the Responses API."""
    router = APIRouter()
    one = _Responses(gateway)
    answer = json_answer("The response.", _SCHEMA, events=True)

    @router.post(
        "/v1/responses",
        responses=with_errors(answer, body=True),
        openapi_extra=json_body(body_schema(RESPONSE_FIELDS)),
    )
    async def create_response(request: Request) -> Response:
        return await one.create(request)

    @router.get("/v1/responses/{response_id}", responses=with_errors(answer, statuses=(400,)))
    async def get_response(request: Request, response_id: str) -> Response:
        return await one.get(request, response_id)

    @router.post("/v1/responses/{response_id}/cancel", responses=with_errors(answer))
    async def cancel_response(request: Request, response_id: str) -> Response:
        return await one.cancel(request, response_id)

    @router.delete(
        "/v1/responses/{response_id}", responses=with_errors(json_answer("It is gone.", _GONE))
    )
    async def delete_response(request: Request, response_id: str) -> Response:
        return await one.delete(request, response_id)

    @router.get(
        "/v1/responses/{response_id}/input_items",
        responses=with_errors(json_answer("The items.", _LIST), statuses=(400,)),
    )
    async def list_input_items(request: Request, response_id: str) -> Response:
        return await one.input_items(request, response_id)

    return router


def response_writers() -> dict[str, MakeWriter]:
    """What makes the events of responses again."""
    return {_ENDPOINT: _writer_of}


async def _writer_of(
    shard: Shard, status: Status, note: dict[str, Any], start: int
) -> tuple[EventWriter, int]:
    return ResponseWriter(_head_of(shard, status, note), start - 1), 0


class _Responses:
    """What the routes do.

    Args:
        gateway: the parts of the gateway.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Submit a response's request; answer with its events, its end, or at once."""
        gateway = self._gateway
        body = await gateway.read_object(request)
        own, values = RESPONSE_FIELDS.read(body)
        new = read_input(own.get("input"))
        history = await self._history(request, own.get("previous_response_id"))
        messages = [*history, *new]
        check_calls(messages)
        fields = response_request(own, values, messages, gateway.settings.default_max_tokens)
        stored, background = own.get("store", True), bool(own.get("background"))
        if stored:
            fields["retention_ms"] = gateway.settings.response_retention_s * 1000
        lane, tier = service_tier(own)
        echoed = echoed_fields(own, values)
        note = {"endpoint": _ENDPOINT, "tier": tier, "echoed": echoed, "store": stored,
                "history": history, "input": new}  # fmt: skip
        submission = await gateway.submit(
            request,
            RESPONSE_FIELDS,
            prefix=IdPrefix.RESPONSE,
            model=own.get("model"),
            lane=lane,
            fields=fields,
            note=note,
            body=body,
            keep=background,
        )
        created = submission.accepted_at // 1000
        head = ResponseHead(submission.id, created, submission.model, tier, echoed)
        if own.get("stream"):
            writer = ResponseWriter(head, submission.start - 1, refuses=not background)
            return gateway.stream(submission, writer, reads_all=True, opens=background)
        if background:
            submission.output.feed.close()
            await submission.admission.release()
            return JSONResponse(
                response_object(head, State.QUEUED), headers={"x-request-id": submission.id}
            )

        def build(result: Result) -> bytes:
            refusal = refusal_of(result.end)
            if refusal is not None:
                raise refusal
            return bytes(JSONResponse(ended_object(head, result)).body)

        return gateway.whole(submission, build)

    async def get(self, request: Request, response_id: str) -> Response:
        """The response as it is now, or its events."""
        shard, status, note = await self._find(request, response_id)
        head = _head_of(shard, status, note)
        if not _wants_events(request):
            whole = await _object(shard, status, head)
            return JSONResponse(whole, headers={"x-request-id": status.id})
        after = last_event_id(request) - 1  # the header wins, see there
        given = request.query_params.get("starting_after")
        if given is not None and "last-event-id" not in request.headers:
            after = read_index(given, "starting_after")
        return self._gateway.replay(shard, status, ResponseWriter(head, after))

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Stop a background response."""
        shard, status, note = await self._find(request, response_id)
        head = _head_of(shard, status, note)
        if not head.background:
            message = "only a response with background true can be cancelled"
            raise invalid("response_id", message, "not_cancellable")
        with contextlib.suppress(UnknownRequest):
            await shard.producer.cancel(status.id)
        status = await shard.producer.status(status.id)
        return JSONResponse(await _object(shard, status, head))

    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget a response; one that runs ends first."""
        shard, status, _ = await self._find(request, response_id)
        await shard.producer.delete(status.id)
        return JSONResponse({"id": status.id, "object": "response", "deleted": True})

    async def input_items(self, request: Request, response_id: str) -> Response:
        """The conversation that the response answers, the latest item first."""
        _, status, note = await self._find(request, response_id)
        query = request.query_params
        limit = read_index(query.get("limit", "20"), "limit")
        order, after = query.get("order", "desc"), query.get("after")
        if not 1 <= limit <= _MAX_ITEMS or order not in ("asc", "desc"):
            message = f"limit: 1 to {_MAX_ITEMS}; order: asc or desc"
            raise invalid("limit" if order in ("asc", "desc") else "order", message)
        items = input_items(status.id, [*note.get("history", []), *note.get("input", [])])
        if order == "desc":
            items.reverse()
        names = [item["id"] for item in items]
        if after is not None:
            if after not in names:
                raise invalid("after", "after: no such item")
            items = items[names.index(after) + 1 :]
        page = items[:limit]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )

    async def _history(self, request: Request, previous: str | None) -> list[dict[str, Any]]:
        """The conversation up to the end of an earlier response."""
        if previous is None:
            return []
        try:
            shard, status, note = await self._find(request, previous)
        except ApiError as error:
            if error.status != 404:
                raise
            message = f"previous_response_id: the response {previous[:128]!r} is not known"
            raise ApiError(
                400, message, "previous_response_not_found", param="previous_response_id"
            ) from None
        if status.state is not State.COMPLETED:
            message = f"previous_response_id: that response is {status.state.value}"
            raise invalid("previous_response_id", message, "previous_response_not_found")
        result = await shard.producer.result(status.id)
        return [*note["history"], *note["input"], assistant_message(status.id, result.choices[0])]

    async def _find(
        self, request: Request, response_id: str
    ) -> tuple[Shard, Status, dict[str, Any]]:
        """A stored response of the caller.

        Raises:
            ApiError: 404, there is none.
        """
        caller = await self._gateway.caller(request)
        try:
            found = await self._gateway.directory.locate(response_id)
        except InvalidRequest:
            found = None
        except PenstockError as error:
            raise error_of(error) from None
        note: Mapping[str, Any] = {} if found is None else note_of(found[1])
        mine = found is not None and found[1].tenant == caller.tenant
        if found is None or not mine or note.get("endpoint") != _ENDPOINT or not note["store"]:
            message = f"the response {response_id[:128]!r} is not known, or is not kept any more"
            raise ApiError(404, message, "response_not_found")
        return found[0], found[1], dict(note)


def _wants_events(request: Request) -> bool:
    """The parameter ``stream``.

    Raises:
        ApiError: 400, it is neither true nor false.
    """
    given = request.query_params.get("stream", "false")
    if given.lower() not in ("true", "1", "false", "0"):
        raise invalid("stream", f"stream: got {given[:40]!r}; allowed: true or false")
    return given.lower() in ("true", "1")


def _head_of(shard: Shard, status: Status, note: Mapping[str, Any]) -> ResponseHead:
    created = (status.accepted_at or 0) // 1000
    return ResponseHead(status.id, created, shard.keys.model, note["tier"], note["echoed"])


async def _object(shard: Shard, status: Status, head: ResponseHead) -> dict[str, Any]:
    if status.state not in TERMINAL_STATES:
        return response_object(head, status.state)
    return ended_object(head, await shard.producer.result(status.id, check=False))

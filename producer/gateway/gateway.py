"""What endpoints share: reading a body, submitting its request, answering with the output."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from penstock.shared.errors import PenstockError, UnknownRequest
from penstock.shared.protocol import Lane, OnDisconnect, Reason
from penstock.shared.protocol import Request as QueueRequest
from penstock.shared.settings import GatewaySettings, Settings

from ..client import Producer
from ..results import Result
from .answers import EventWriter, StreamedAnswer, WholeAnswer
from .api_errors import ApiError, error_of, invalid
from .callers import Access, Admission, Caller
from .model_directory import ModelDirectory, check_model
from .request_body import read_object

__all__ = ["Gateway", "Submission"]

_MAX_KEY_CHARS = 256


class _Names(Protocol):
    """How an endpoint calls the fields of the queue's request."""

    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was accepted.

    Attributes:
        id: its id.
        model: its model's name.
        producer: the client of its shard.
        caller: who submitted it.
        admission: what its caller's limits allowed.
        keep: it goes on when its client leaves.
    """

    id: str
    model: str
    producer: Producer
    caller: Caller
    admission: Admission
    keep: bool


class Gateway:
    """The parts of a running gateway, as endpoints use them.

    Args:
        settings: the whole tree.
        access: the door.
        directory: the models.
    """

    def __init__(self, settings: Settings, access: Access, directory: ModelDirectory) -> None:
        self.settings: GatewaySettings = settings.gateway
        self.access = access
        self.directory = directory

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body; see :func:`.request_body.read_object`."""
        return await read_object(request, self.settings)

    async def submit(
        self,
        request: Request,
        table: _Names,
        *,
        prefix: str,
        model: object,
        lane: Lane,
        fields: Mapping[str, Any],
    ) -> Submission:
        """Submit a request once its client is known, its fields are right and there is room.

        Args:
            request: the HTTP request, whose headers say who asks and how.
            table: the names of its fields.
            prefix: what its id begins with.
            model: the body's model.
            lane: how urgent it is.
            fields: of the queue's request, with its prompt.

        Raises:
            ApiError: it was refused; nothing was stored.
        """
        caller = await self.access.authenticate(request.headers)
        name = check_model(model)
        _check_rights(caller, name, lane)
        key = request.headers.get("idempotency-key")
        keep = key is not None or _wants_to_stay(request)
        request_id = prefix + (uuid.uuid4().hex if key is None else _key_id(caller, key))
        on_disconnect = OnDisconnect.CONTINUE if keep else OnDisconnect.CANCEL
        values = {
            **fields, "lane": lane, "tenant": caller.tenant, "on_disconnect": on_disconnect,
        }  # fmt: skip
        try:
            cost = QueueRequest.build(id=request_id, **values).cost_estimate
            shard = await self.directory.choose(name, request_id)
            admission = await self.access.admit(caller, cost)
            try:
                await shard.producer.submit(id=request_id, **values)
            except BaseException:
                await admission.release()
                raise
        except PenstockError as error:
            raise error_of(error, table.names) from None
        return Submission(request_id, name, shard.producer, caller, admission, keep)

    def stream(self, submission: Submission, writer: EventWriter) -> Response:
        """The answer as events."""
        stream = submission.producer.stream(submission.id, timeout=self.settings.keep_alive_s)
        return StreamedAnswer(
            stream,
            writer,
            on_leave=functools.partial(_leave, submission),
            on_done=submission.admission.release,
            headers=_headers(submission),
        )

    def whole(self, submission: Submission, build: Callable[[Result], bytes]) -> Response:
        """The answer as one object."""
        return WholeAnswer(
            submission.producer.stream(submission.id),
            build,
            on_leave=functools.partial(_leave, submission),
            on_done=submission.admission.release,
            headers=_headers(submission),
        )


def _headers(submission: Submission) -> dict[str, str]:
    return {"x-request-id": submission.id, **submission.admission.headers}


async def _leave(submission: Submission) -> None:
    """What becomes of the request of a client that left."""
    if submission.keep:
        return
    with contextlib.suppress(UnknownRequest):
        await submission.producer.cancel(submission.id, reason=Reason.DISCONNECTED)


def _check_rights(caller: Caller, model: str, lane: Lane) -> None:
    if caller.models is not None and model not in caller.models:
        message = f"this API key may not use the model {model!r}"
        raise ApiError(403, message, "model_not_allowed", param="model")
    if lane not in caller.lanes:
        message = f"this API key may not use the lane {lane.value}"
        raise ApiError(403, message, "tier_not_allowed", param="service_tier")


def _wants_to_stay(request: Request) -> bool:
    value = request.headers.get("x-penstock-on-disconnect", "cancel")
    if value not in ("cancel", "continue"):
        raise invalid(None, "x-penstock-on-disconnect: allowed are cancel and continue")
    return value == "continue"


def _key_id(caller: Caller, key: str) -> str:
    """The same id for the same key of the same tenant, and no other."""
    if not key or len(key) > _MAX_KEY_CHARS:
        raise invalid(None, f"Idempotency-Key: 1 to {_MAX_KEY_CHARS} characters")
    return hashlib.sha256(f"{caller.tenant}\0{key}".encode()).hexdigest()[:32]

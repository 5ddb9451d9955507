"""What endpoints share: reading a body, submitting its request, answering with the output."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from penstock.shared.errors import IdConflict, PenstockError, UnknownRequest
from penstock.shared.protocol.request import Request as QueueRequest
from penstock.shared.protocol.states import (
    TERMINAL_STATES,
    Lane,
    ModelKind,
    OnDisconnect,
    Reason,
)
from penstock.shared.settings import BatchesSettings, GatewaySettings, Settings

from ..batches.webhooks.request_ends import RequestWatch
from ..client import Producer
from ..results import Result, Status
from .access.callers import Access, Admission, Caller, tokens_of
from .answering.answers import EventWriter, StreamedAnswer, WholeAnswer
from .answering.event_ids import last_event_id
from .answering.open_answers import OpenAnswers
from .answering.request_ids import IdPrefix, new_id, other_ids
from .answering.request_output import Output
from .api_errors import error_of, invalid
from .model_directory import ModelDirectory, Shard, check_kind, check_model
from .monitoring.gateway_metrics import GatewayMetrics
from .serving.request_body import read_object

__all__ = ["WEBHOOK_HEADER", "Gateway", "Submission"]

WEBHOOK_HEADER = "x-penstock-webhook"
"""URL to call when the request, or the batch, has ended."""

_log = logging.getLogger("penstock.gateway")

_CALLER = "penstock.caller"
"""Where a request's scope holds its :class:`Caller`, once that was asked for."""


class _Names(Protocol):
    """How an endpoint calls the fields of the queue's request."""

    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was accepted.

    Attributes:
        id: its id.
        model: its model's name.
        shard: where it is.
        caller: who submitted it.
        admission: what its caller's limits allowed.
        keep: it goes on when its client leaves.
        accepted_at: when it was first accepted, in ms of Redis' clock.
        start: the first token that the client wants.
        output: what it gives.
    """

    id: str
    model: str
    shard: Shard
    caller: Caller
    admission: Admission
    keep: bool
    accepted_at: int
    start: int
    output: Output


class Gateway:
    """The parts of a running gateway, as endpoints use them.

    Args:
        settings: the whole tree.
        access: who may submit.
        directory: the models.
        watch: keeps what is to be called at a request's end.
    """

    def __init__(
        self, settings: Settings, access: Access, directory: ModelDirectory, watch: RequestWatch
    ) -> None:
        self.settings: GatewaySettings = settings.gateway
        self.batch_settings: BatchesSettings = settings.batches
        self.metrics = GatewayMetrics()
        self.answers = OpenAnswers(self.metrics, self.settings.keep_alive_s)
        self.access = access
        self.directory = directory
        self._watch = watch

    def end_streams(self) -> None:
        """Tell all clients that still wait to come back elsewhere."""
        self.answers.end_all()

    async def caller(self, request: Request) -> Caller:
        """Who sent a request, looked up once; see :meth:`.Access.authenticate`."""
        if _CALLER not in request.scope:
            request.scope[_CALLER] = await self.access.authenticate(request.headers)
        return cast(Caller, request.scope[_CALLER])

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body, read only once its sender is known.

        Raises:
            ApiError: 401, no valid key; else see :func:`.request_body.read_object`.
        """
        await self.caller(request)
        return await read_object(request, self.settings)

    async def submit(
        self,
        request: Request,
        table: _Names,
        *,
        prefix: IdPrefix,
        model: object,
        lane: Lane,
        fields: Mapping[str, Any],
        note: Mapping[str, Any],
        body: Mapping[str, Any],
        keep: bool = False,
        kind: ModelKind = ModelKind.GENERATE,
        number: int = 0,
    ) -> Submission:
        """Submit a request once its client is known, its fields are right and there is room.

        Args:
            request: the HTTP request; its headers identify the client and its wishes.
            table: the names of its fields.
            prefix: what its id begins with.
            model: the body's model.
            lane: how urgent it is.
            fields: of the queue's request, with its prompt.
            note: kept with it, for a gateway that makes its events again.
            body: the whole body, which must be the same for the same Idempotency-Key.
            keep: it goes on when its client leaves, whatever the headers say.
            kind: what the model must do.
            number: of the request among those of one call.

        Raises:
            ApiError: it was refused; nothing was stored.
        """
        caller = await self.caller(request)
        name = check_model(model)
        caller.check(name, lane)
        key, start = request.headers.get("idempotency-key"), last_event_id(request)
        if start and key is None:
            raise invalid(None, "Last-Event-ID: needs the Idempotency-Key of the first request")
        webhook = request.headers.get(WEBHOOK_HEADER)
        keep = keep or key is not None or webhook is not None or _wants_to_stay(request)
        digest = None if key is None else caller.id_of(key)
        request_id = new_id(prefix, digest, number)
        on_disconnect = OnDisconnect.CONTINUE if keep else OnDisconnect.CANCEL
        values = {
            **fields, "lane": lane, "tenant": caller.tenant, "on_disconnect": on_disconnect,
        }  # fmt: skip
        try:
            built = QueueRequest.build(id=request_id, **values)
            others = () if digest is None or number else other_ids(prefix, digest)
            shard, is_known = await self._shard(name, request_id, key, others)
            check_kind(shard, kind)
            if webhook is not None:
                await self._watch.check(webhook)
            admission = await self.access.admit(
                caller, built.cost_estimate, request_id, joins=is_known
            )
            producer = shard.producer
            feed = producer.feeds.open(request_id, attended=not keep)
            try:
                submitted = await producer.send(
                    built, note=_pack_note(note, body if key else None), attend=not keep
                )
                if is_known and not submitted.duplicate:
                    admission = await self._admit_late(caller, built, producer)
                if webhook is not None:
                    await self._watch.watch(producer.keys, request_id, webhook)
            except BaseException:
                feed.close()
                await admission.release()
                raise
            if key is None or not submitted.duplicate:
                admission.bind(functools.partial(_tokens_used, producer, request_id))
        except PenstockError as error:
            raise error_of(error, table.names) from None
        return Submission(
            id=request_id,
            model=name,
            shard=shard,
            caller=caller,
            admission=admission,
            keep=keep,
            accepted_at=submitted.accepted_at,
            start=start,
            output=Output(
                producer.feeds,
                feed,
                index=start,
                is_new=not submitted.duplicate,
                repeats=key is not None,
                time_left_ms=producer.time_left_ms(built),
            ),
        )

    async def _shard(
        self, model: str, request_id: str, key: str | None, others: Sequence[str]
    ) -> tuple[Shard, bool]:
        """Where a request goes: to its first submission, if it is one more of the same key.

        Returns:
            The shard, and whether the request is known there.

        Raises:
            IdConflict: the key was used at another endpoint or for another model.
        """
        found = None if key is None else await self.directory.locate(request_id)
        if found is None:
            if others and await self.directory.knows_any(others):
                raise IdConflict(request_id)
            return await self.directory.choose(model, request_id), False
        if found[0].keys.model != model:
            raise IdConflict(request_id)
        return found[0], True

    async def _admit_late(
        self, caller: Caller, built: QueueRequest, producer: Producer
    ) -> Admission:
        """Charge a request that was to join one, which Redis forgot before it came.

        Raises:
            ApiError: it is refused, and does not run.
        """
        try:
            return await self.access.admit(caller, built.cost_estimate, built.id)
        except BaseException:
            with contextlib.suppress(UnknownRequest):
                await producer.cancel(built.id)
            raise

    def stream(
        self,
        submission: Submission,
        writer: EventWriter,
        *,
        reads_all: bool = False,
        opens: bool = False,
    ) -> Response:
        """The answer as events.

        Args:
            submission: the request.
            writer: makes the events from where the client wants them.
            reads_all: the writer needs the tokens before that, too.
            opens: events that need no token are sent at once. A worker's refusal is an event then.
        """
        if reads_all:
            submission.output.index = 0
        return StreamedAnswer(
            submission.output,
            writer,
            answers=self.answers,
            on_leave=functools.partial(_leave, submission),
            on_done=submission.admission.release,
            headers=_headers(submission),
            opens=opens,
        )

    def replay(self, shard: Shard, status: Status, writer: EventWriter, index: int = 0) -> Response:
        """The output of a request that exists, from a token on; who only reads decides nothing."""
        return StreamedAnswer(
            Output.of(shard.producer.feeds, status.id, index),
            writer,
            answers=self.answers,
            on_leave=_nothing,
            on_done=_nothing,
            headers={"x-request-id": status.id},
            opens=status.state not in TERMINAL_STATES,
        )

    def whole(self, submission: Submission, build: Callable[[Result], bytes]) -> Response:
        """The answer as one object."""
        return self.joined([submission], lambda results: build(results[0]))

    def joined(
        self, submissions: Sequence[Submission], build: Callable[[Sequence[Result]], bytes]
    ) -> Response:
        """The answer of several requests as one object.

        Args:
            submissions: the requests.
            build: makes the body of their results; raises ApiError if one was not completed.
        """
        for submission in submissions:
            submission.output.index = 0
        return WholeAnswer(
            [submission.output for submission in submissions],
            build,
            answers=self.answers,
            on_leave=functools.partial(_for_each, submissions, _leave),
            on_done=functools.partial(_for_each, submissions, _release),
            headers={**_headers(submissions[-1]), "x-request-id": submissions[0].id},
        )

    async def result(self, submission: Submission) -> Result:
        """Wait for the result of a request that is a part of answering another one.

        Raises:
            ApiError: it cannot be read.
        """
        submission.output.feed.close()
        try:
            return await submission.shard.producer.result(submission.id, check=False)
        except PenstockError as error:
            raise error_of(error) from None
        except asyncio.CancelledError:  # its client left
            await _leave(submission)
            raise
        finally:
            await submission.admission.release()

    async def give_up(self, submissions: Sequence[Submission]) -> None:
        """End requests whose answer cannot be given, unless they are kept."""
        for submission in submissions:
            submission.output.feed.close()
        try:
            await _for_each(submissions, _leave)
        except PenstockError as error:
            # No heartbeat follows, so that they end all the same.
            _log.warning("%d requests could not be given up: %s", len(submissions), error)
        finally:
            await _for_each(submissions, _release)


async def _for_each(
    submissions: Sequence[Submission], do: Callable[[Submission], Awaitable[None]]
) -> None:
    for submission in submissions:
        await do(submission)


async def _release(submission: Submission) -> None:
    await submission.admission.release()


async def _nothing() -> None:
    """Nothing is to be done."""


def _pack_note(note: Mapping[str, Any], body: Mapping[str, Any] | None) -> bytes:
    if body is not None:
        canonical = json.dumps(body, separators=(",", ":"), sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:32]
        note = {**note, "body": digest}
    return json.dumps(note, separators=(",", ":"), sort_keys=True).encode()


async def _tokens_used(producer: Producer, request_id: str) -> int | None:
    """What a request has used of its key's tokens; None while it runs."""
    try:
        end = (await producer.status(request_id)).end
    except UnknownRequest:
        return 0
    return None if end is None else tokens_of(end)


def _headers(submission: Submission) -> dict[str, str]:
    return {"x-request-id": submission.id, **submission.admission.headers}


async def _leave(submission: Submission) -> None:
    """What becomes of the request of a client that left, and perhaps reads it again elsewhere."""
    producer = submission.shard.producer
    if submission.keep or producer.feeds.is_read(submission.id):
        return
    with contextlib.suppress(UnknownRequest):
        await producer.cancel(submission.id, reason=Reason.DISCONNECTED)


def _wants_to_stay(request: Request) -> bool:
    value = request.headers.get("x-penstock-on-disconnect", "cancel")
    if value not in ("cancel", "continue"):
        raise invalid(None, "x-penstock-on-disconnect: allowed are cancel and continue")
    return value == "continue"

"""The worker's edge to Redis: tokens out, claims in, lease and sweeps, one round trip a step.

An exchange is one pipeline of small scripts: ``append`` for everything the engine produced since
the last one, ``claim`` when there is room, ``sweep`` every third of a lease. It is sent again
unchanged until it is answered: appends are idempotent by index, and claims whose reply was lost
are found by the audit that follows every broken exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import PenstockError, RedisUnavailable
from penstock.shared.protocol import Lane
from penstock.shared.scripts.operations import AppendRow, Operations
from penstock.shared.scripts.replies import read_statuses
from penstock.shared.scripts.script_loader import Call, Command

from ..metrics import WorkerMetrics
from .claim_budget import NO_ROOM, Room
from .claims import Intake
from .engine_client import EngineLink
from .outbox import Outbox
from .owned_requests import run_name

__all__ = ["Capacity", "RedisEdge"]

_log = logging.getLogger("penstock.edge")

_APPENDS_PER_CALL = 256
"""Replies and pushes leave Redis only when a script ends, so one call must stay small."""

_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much a worker takes on.

    Attributes:
        max_sequences: requests owned at the same time.
        claim_batch: requests claimed in one exchange at most.
        lease_ms: how long Redis believes a silent worker alive.
        heartbeat_ms: how often the lease is renewed when no exchange does it.
    """

    max_sequences: int
    claim_batch: int
    lease_ms: int
    heartbeat_ms: int


class RedisEdge:
    """Exchanges with Redis on behalf of one worker.

    Args:
        listener: a connection of its own for the blocking wait on the bell.
        operations: the scripts of the shard.
        worker_id: unique to this process; never reused.
        capacity: see there.
        engine, outbox, intake, metrics: the worker's other parts.
        hang_timeout_s: a step that runs longer means that the engine hangs; then nothing is sent
            any more, so that the lease ends and others take over.
        drain_timeout_s: how long Redis may leave a worker that drains without an answer.
    """

    def __init__(
        self,
        listener: Redis,
        operations: Operations,
        worker_id: str,
        capacity: Capacity,
        *,
        engine: EngineLink,
        outbox: Outbox,
        intake: Intake,
        metrics: WorkerMetrics,
        wake: asyncio.Event,
        hang_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._operations = operations
        self._worker_id = worker_id
        self._capacity = capacity
        self._engine = engine
        self._outbox = outbox
        self._intake = intake
        self._metrics = metrics
        self._wake = wake
        self._hang_timeout_s = hang_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._rung = "0-0"
        self._searched = -1
        self._next_renewal = 0.0
        self._next_sweep = 0.0
        self._sweep_again = False
        self._needs_audit = False
        self._stopping = False
        self._running: asyncio.Timeout | None = None
        self._give_up_at: float | None = None  # by the event loop's clock

    def stop(self) -> None:
        """Claim nothing more, and end :meth:`run` after the present exchange.

        If Redis does not answer that, it ends without, ``drain_timeout_s`` from the first call.
        """
        self._stopping = True
        if self._give_up_at is None:
            self._give_up_at = asyncio.get_running_loop().time() + self._drain_timeout_s
            if self._running is not None:
                self._running.reschedule(self._give_up_at)
        self._wake.set()

    @property
    def hung(self) -> bool:
        """Whether the present step has run for longer than any step may."""
        return self._engine.stuck_for() > self._hang_timeout_s

    @property
    def engine_failure(self) -> str | None:
        """Why the engine must be replaced; None while it need not be."""
        return None if self._stopping else self._engine.failure

    def expect_work(self) -> None:
        """There is something to claim: do it at once, without waiting for the bell."""
        self._searched = -1
        self._wake.set()

    async def run(self) -> bool:
        """Exchange until :meth:`stop`, or until the engine hangs or breaks.

        Returns:
            True if it was stopped; False if the engine can not go on and must be replaced.
        """
        works = True
        with contextlib.suppress(TimeoutError):  # see stop
            async with asyncio.timeout(None) as self._running, asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._tick()), tasks.create_task(self._hear_bell())]
                while works and not self._stopping:
                    await self.exchange()
                    await self._wake.wait()
                    self._wake.clear()
                    works = not self.hung and self._engine.failure is None
                # Some cancellations are lost inside redis-py on Python 3.11 (asyncio.wait_for);
                # then the flag ends the listener when its read returns.
                self._stopping = True
                for helper in helpers:
                    helper.cancel()
        self._running = None
        return works

    async def exchange(self) -> None:
        """One round trip, if there is anything to say."""
        now = time.monotonic()
        batches = self._take()
        room = self._room()
        renew = now >= self._next_renewal
        sweep = now >= self._next_sweep or self._sweep_again
        if not (batches or room.requests or renew or sweep):
            return
        calls: list[Call | Command] = [self._append(batch) for batch in batches]
        if room.requests or (renew and not batches):
            calls.append(self._claim(room))
        if sweep:
            lease_ms = self._capacity.lease_ms
            calls += (self._operations.sweep(lease_ms=lease_ms), self._operations.depth())
        replies = await self._send(calls)
        if replies is None:
            return
        self._next_renewal = now + self._capacity.heartbeat_ms / 1000
        await self._settle(batches, replies[: len(batches)])
        if len(calls) > len(batches) + 2 * sweep:
            self._read_claim(replies[len(batches)], room)
        if sweep:
            self._after_sweep(now, *replies[-2:])
        if self._needs_audit:
            await self._audit()

    async def drain(self) -> int:
        """Publish what is there, then give every request back; returns how many.

        Raises:
            RedisUnavailable: the server refuses, or has not answered ``drain_timeout_s`` after
                :meth:`stop`.
        """
        try:
            async with asyncio.timeout_at(self._give_up_at):
                while self._outbox.has_pending:
                    await self.exchange()
                return await self._release_all()
        except TimeoutError:
            raise RedisUnavailable("Redis did not answer in time") from None

    async def _release_all(self) -> int:
        for attempt in range(1_000_000_000):
            try:
                return await self._operations.release_all(self._worker_id, blame=False)
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                await self._pause(attempt, error)
        raise AssertionError("unreachable")

    # -- what goes out --------------------------------------------------------------------------

    def _take(self) -> list[list[AppendRow]]:
        batches = []
        while self._outbox.has_pending:
            if batch := self._outbox.take(_APPENDS_PER_CALL):
                batches.append(batch)
        return batches

    def _append(self, batch: Sequence[AppendRow]) -> Call:
        return self._operations.append(self._worker_id, batch, lease_ms=self._capacity.lease_ms)

    def _room(self) -> Room:
        """What to ask for now; nothing where it was asked for and not found."""
        if self._stopping or self._searched == Lane.BATCH.rank:
            return NO_ROOM
        room = Room.beside(
            self._outbox.open_sequences(),
            self._engine.load.waiting,
            self._engine.arriving_tokens,
            max_sequences=self._capacity.max_sequences,
            claim_batch=self._capacity.claim_batch,
            step_tokens=self._engine.step_tokens,
        )
        return room if room.least_urgent.rank > self._searched else NO_ROOM

    def _claim(self, room: Room) -> Call:
        return self._operations.claim(
            self._worker_id,
            lease_ms=self._capacity.lease_ms,
            requests=room.requests,
            tokens=max(1, self._engine.load.available_tokens),
            suspect_ok=self._outbox.suspects == 0,
            least_urgent=room.least_urgent,
        )

    async def _send(self, calls: Sequence[Call | Command]) -> list[Any] | None:
        """Send until answered. What to send is fixed: only the outcome is unknown in between.

        None if the engine ended before Redis answered: then others go on, and soon.
        """
        for attempt in range(1_000_000_000):
            began = time.perf_counter()
            try:
                replies = await self._operations.run(calls)
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                self._needs_audit = True
                if self.engine_failure is not None:
                    return None
                await self._pause(attempt, error)
                continue
            self._metrics.exchange_seconds.observe(time.perf_counter() - began)
            return replies
        raise AssertionError("unreachable")

    async def _pause(self, attempt: int, error: Exception) -> None:
        self._metrics.redis_errors.inc()
        pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
        _log.warning("Redis did not answer (%s); trying again in %g s", error, pause)
        await asyncio.sleep(pause)

    # -- what comes back ------------------------------------------------------------------------

    async def _settle(self, batches: Sequence[Sequence[AppendRow]], replies: Sequence[Any]) -> None:
        for batch, reply in zip(batches, replies, strict=True):
            if isinstance(reply, ResponseError):
                # The script as a whole was refused for good (an ACL, a Redis bug), and nothing was
                # written. Refusals that pass are broken connections here: see
                # shared/redis/transient_errors.py.
                _log.error("append was refused: %s", reply)
                self._metrics.redis_errors.inc()
                ids = tuple(row[0] for row in batch)
                self._outbox.forget(ids)
                await self._give_up([run_name(row[0], row[1]) for row in batch], ids)
                continue
            settled = self._outbox.settle(batch, read_statuses(reply, len(batch)))
            self._needs_audit |= settled.broken
            await self._give_up(settled.lost, settled.mismatched)

    async def _give_up(self, lost: Sequence[str], release: Sequence[str]) -> None:
        for run in lost:
            self._engine.abort(run)
        if lost:
            self._searched = -1
        if release:
            try:
                await self._operations.release(self._worker_id, release)
            except (RedisError, PenstockError) as error:
                # What stays ours in Redis without our knowing is what the audit looks for.
                _log.warning("could not release: %s", error)
                self._needs_audit = True

    def _read_claim(self, reply: Any, room: Room) -> None:
        if isinstance(reply, ResponseError):
            _log.error("claim was refused: %s", reply)
            self._metrics.redis_errors.inc()
            return
        claimed = self._operations.read_claim(reply)
        if room.requests:
            # What came while the answer was on its way, the claim did not see.
            may_be_more = bool(claimed.claims) or _place(self._rung) > _place(claimed.bell)
            self._searched = -1 if may_be_more else room.least_urgent.rank
        self._needs_audit |= self._intake.accept(claimed.claims)
        if claimed.more:
            self._wake.set()

    def _after_sweep(self, now: float, reply: Any, depth: Any) -> None:
        regular, self._sweep_again = now >= self._next_sweep, False
        if regular:
            self._next_sweep = now + min(1.0, self._capacity.lease_ms / 3000)
        self._show_depth(depth)
        if isinstance(reply, ResponseError):
            _log.error("sweep was refused: %s", reply)
            self._metrics.redis_errors.inc()
            return
        swept = self._operations.read_sweep(reply)
        self._metrics.swept.labels("expired").inc(swept.expired)
        self._metrics.swept.labels("reaped").inc(swept.reaped)
        self._metrics.swept.labels("disconnected").inc(swept.abandoned)
        if swept.reaped:
            _log.warning("took %d requests from %d dead workers", swept.reaped, swept.workers)
        if swept.failed:
            _log.error("a sweep could not mend %d requests: %s", swept.failed, swept.error)
        # A suspect, or work left for want of room, rings no bell when its turn comes.
        self._searched = -1
        if swept.more:  # with the next exchange, so that tokens are not held back
            self._sweep_again = True
            self._wake.set()
        if regular:
            # Requests that produce nothing yet (queued prefill) hear of a cancel only if they ask.
            self._outbox.probe()

    def _show_depth(self, reply: Any) -> None:
        if isinstance(reply, ResponseError):
            return  # gauges only; who may not read them may still serve
        for lane, (requests, tokens) in self._operations.read_depth(reply).items():
            self._metrics.queue_requests.labels(lane.value).set(requests)
            self._metrics.queue_tokens.labels(lane.value).set(tokens)

    async def _audit(self) -> None:
        try:
            orphans = await self._operations.audit(self._worker_id, self._outbox.owned)
        except (RedisError, PenstockError, OSError):
            return  # stays due
        self._needs_audit = False
        if orphans:
            _log.warning("gave back %d requests whose claim this worker never received", orphans)

    # -- what wakes an exchange -----------------------------------------------------------------

    async def _tick(self) -> None:
        interval = self._capacity.heartbeat_ms / 1000
        while True:
            await asyncio.sleep(interval)
            self._wake.set()

    async def _hear_bell(self) -> None:
        """Waits for new work. Entries that came since the last claim wake it at once."""
        key = self._operations.keys.bell
        while not self._stopping:
            try:
                rung = await self._listener.xread({key: self._rung}, count=1, block=1000)
            except (RedisError, OSError):
                if not self._stopping:
                    await asyncio.sleep(0.5)
                continue
            if rung:
                self._rung = rung[0][1][-1][0].decode()
                self.expect_work()


def _place(entry: str) -> tuple[int, int]:
    """An id of a stream's entry, to be compared."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)

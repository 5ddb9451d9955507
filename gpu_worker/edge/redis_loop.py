"""The worker's loop with Redis: tokens out, claims in, lease and sweeps, one round trip a step.

An exchange is one pipeline of small scripts. ``append`` carries everything the engine produced
since the last exchange. ``claim`` runs if the worker can take more, ``sweep`` every third of a
lease. The worker sends an exchange again unchanged until Redis answers: appends are idempotent by
index. An audit follows every broken exchange and finds claims whose reply was lost. Another one
comes once a lease, since Redis may execute a claim long after the worker gave up waiting for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import PenstockError, RedisUnavailable
from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.operations import AppendRow, Operations
from penstock.shared.scripts.replies import read_statuses
from penstock.shared.scripts.script_loader import Call, Command

from ..monitoring.heartbeat import HeartbeatWatch
from ..monitoring.metrics import WorkerMetrics
from .bell import Bell
from .claim_budget import NO_CLAIMS, Capacity, ClaimBudget
from .claims import ClaimReceiver
from .engine_client import EngineClient
from .guarded_task import Guard, Ticker
from .outbox import Outbox
from .owned_requests import OwnedRequests, run_name

__all__ = ["RedisLoop"]

_log = logging.getLogger("penstock.edge")

_APPENDS_PER_CALL = 256
"""Redis sends replies and pushes only when a script ends, so one call must stay small."""

_MOST_CLAIMED_TOKENS = 1 << 18
"""Payloads are parsed between two exchanges: those of one claim must take tenths of a second."""

_MOST_FAILED_EXCHANGES = 8
"""After this many exchanges in a row whose replies raised, blame the process, not the replies."""

_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class _Part(NamedTuple):
    """One call of an exchange, and what is done with its reply."""

    call: Call | Command
    handle: Callable[[Any], None]
    name: str
    after_outage: Call | None = None  # what to send instead if Redis has been away


class RedisLoop:
    """Exchanges with Redis on behalf of one worker.

    Args:
        listener: a connection of its own for the blocking wait on the bell.
        operations: the scripts of the shard.
        worker_id: unique to this process; never reused.
        capacity: how much the worker takes on.
        engine, owned, outbox, claims, metrics, watch: the worker's other parts.
        wake: set when there is something to exchange.
        drain_timeout_s: how long Redis may leave a draining worker without an answer.
    """

    def __init__(
        self,
        listener: Redis,
        operations: Operations,
        worker_id: str,
        capacity: Capacity,
        *,
        engine: EngineClient,
        owned: OwnedRequests,
        outbox: Outbox,
        claims: ClaimReceiver,
        metrics: WorkerMetrics,
        watch: HeartbeatWatch,
        wake: asyncio.Event,
        drain_timeout_s: float,
    ) -> None:
        self._operations = operations
        self._worker_id = worker_id
        self._capacity = capacity
        self._engine = engine
        self._owned = owned
        self._outbox = outbox
        self._claims = claims
        self._metrics = metrics
        self._watch = watch
        self._wake = wake
        self._drain_timeout_s = drain_timeout_s
        self._guard = Guard("exchange", metrics)
        self._failed_exchanges = 0
        self._empty_to_rank = -1  # the last claim found nothing in lanes up to this rank
        self._to_release: list[str] = []
        self._next_renewal = self._next_sweep = 0.0
        self._sweep_again = False
        self._lost_redis = self._needs_audit = self._stopping = False
        self._lease_s = capacity.lease_ms / 1000
        self._next_audit = time.monotonic() + self._lease_s
        self._running: asyncio.Timeout | None = None
        self._give_up_at: float | None = None  # by the event loop's clock
        self._turns = watch.add("the exchange with Redis")
        self._lease = watch.add("the renewal of the lease")
        self._bell = Bell(
            listener, operations.keys.bell, self.expect_work, metrics=metrics, watch=watch
        )

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
    def engine_failure(self) -> str | None:
        """Why the engine must be replaced; None while it need not be."""
        return None if self._stopping else self._engine.failure

    def expect_work(self) -> None:
        """There is something to claim: do it at once, without waiting for the bell."""
        self._empty_to_rank = -1
        self._wake.set()

    async def run(self) -> bool:
        """Exchange until :meth:`stop`, or until the engine breaks.

        Returns:
            True if it was stopped; False if the engine cannot go on and must be replaced.

        Raises:
            Exception: a bug of the loop itself. The process must end, without waiting for tasks.
        """
        works = True
        ticker = Ticker(self._capacity.heartbeat_ms / 1000, self._wake.set)
        self._bell.start()
        try:
            with contextlib.suppress(TimeoutError):  # see stop
                async with asyncio.timeout(None) as self._running:
                    while works and not self._stopping:
                        await self.exchange()
                        await self._wake.wait()
                        self._wake.clear()
                        works = self._engine.failure is None
        finally:
            self._running = None
            ticker.close()
            self._bell.stop()
            self._watch.remove(self._turns)
            self._watch.remove(self._lease)
        await self._bell.close()
        return works

    async def exchange(self) -> None:
        """One round trip, if there is anything to say."""
        self._turns.beat()
        now = time.monotonic()
        parts = self._parts(now)
        if not parts:
            return
        replies = await self._send(parts)
        if replies is None:
            return
        self._next_renewal = now + self._capacity.heartbeat_ms / 1000
        self._handle(parts, replies)
        if self._to_release:
            await self._release()
        if self._needs_audit or now >= self._next_audit:
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
        for attempt in itertools.count():
            try:
                return await self._operations.release_all(self._worker_id, blame=False)
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                await self._pause(attempt, error)
        raise AssertionError("unreachable")

    # -- what goes out --------------------------------------------------------------------------

    def _parts(self, now: float) -> list[_Part]:
        """What there is to exchange. Replies are handled in this order."""
        operations, lease_ms = self._operations, self._capacity.lease_ms
        parts = []
        while self._outbox.has_pending:
            if rows := self._outbox.take(_APPENDS_PER_CALL):
                call = operations.append(self._worker_id, rows, lease_ms=lease_ms)
                parts.append(_Part(call, partial(self._take_append_reply, rows), "append"))
        budget = self._claim_budget()
        if budget.requests or (now >= self._next_renewal and not parts):
            parts.append(_Part(self._claim(budget), partial(self._receive, budget), "claim"))
        if now >= self._next_sweep or self._sweep_again:
            sweep = partial(operations.sweep, lease_ms=lease_ms)
            call, sparing = sweep(spare_readers=self._lost_redis), sweep(spare_readers=True)
            parts.append(_Part(call, partial(self._after_sweep, now), "sweep", sparing))
            parts.append(_Part(operations.depth(), self._show_depth, "depth"))
        return parts

    def _claim_budget(self) -> ClaimBudget:
        """What to ask for now; nothing where the last claim asked and found nothing."""
        if self._stopping or self._empty_to_rank == Lane.BATCH.rank:
            return NO_CLAIMS
        budget = ClaimBudget.beside(
            self._owned.open_sequences,
            self._engine.load.waiting,
            self._owned.arriving_tokens,
            max_sequences=self._capacity.max_sequences,
            claim_batch=self._capacity.claim_batch,
            step_tokens=self._engine.step_tokens,
        )
        return budget if budget.least_urgent.rank > self._empty_to_rank else NO_CLAIMS

    def _claim(self, budget: ClaimBudget) -> Call:
        return self._operations.claim(
            self._worker_id,
            lease_ms=self._capacity.lease_ms,
            requests=budget.requests,
            tokens=min(max(1, self._engine.load.available_tokens), _MOST_CLAIMED_TOKENS),
            suspect_ok=self._owned.suspects == 0,
            least_urgent=budget.least_urgent,
        )

    async def _send(self, parts: Sequence[_Part]) -> list[Any] | None:
        """Send until answered. What was sent may have been executed, so the same is sent again.

        None if the engine ended before Redis answered: then other workers take over, and soon.
        """
        calls = [part.call for part in parts]
        for attempt in itertools.count():
            began = time.perf_counter()
            try:
                replies = await self._operations.run(calls)
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                self._needs_audit = self._lost_redis = True
                calls = [part.after_outage or part.call for part in parts]
                if self.engine_failure is not None:
                    return None
                await self._pause(attempt, error)
                continue
            self._metrics.exchange_seconds.observe(time.perf_counter() - began)
            return replies
        raise AssertionError("unreachable")

    async def _pause(self, attempt: int, error: Exception) -> None:
        """Wait before the next attempt. An outage of Redis is no reason to replace the worker."""
        self._turns.beat()
        self._lease.beat()
        self._metrics.redis_errors.inc()
        pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
        _log.warning("Redis did not answer (%s); trying again in %g s", error, pause)
        await asyncio.sleep(pause)

    # -- what comes back ------------------------------------------------------------------------

    def _handle(self, parts: Sequence[_Part], replies: Sequence[Any]) -> None:
        """Have each reply handled; one that raises costs no other.

        An audit then finds what this worker owns without knowing it, and the probe that follows
        each sweep finds what it no longer owns.
        """
        failed = False
        for part, reply in zip(parts, replies, strict=True):
            try:
                part.handle(reply)
            except Exception as error:
                self._guard.isolated(f"the reply to {part.name}", error)
                failed = self._needs_audit = True
        self._failed_exchanges = self._failed_exchanges + 1 if failed else 0
        if self._failed_exchanges >= _MOST_FAILED_EXCHANGES:
            raise RuntimeError(f"{self._failed_exchanges} exchanges in a row could not be handled")

    def _is_refused(self, name: str, reply: Any) -> bool:
        """Whether the script as a whole was refused for good (by an ACL, or by a bug in it).

        It may have stopped half way, and scripts do not roll back. Refusals that pass are broken
        connections here; see shared/redis/transient_errors.py.
        """
        if not isinstance(reply, ResponseError):
            return False
        _log.error("%s was refused: %s", name, reply)
        self._metrics.redis_errors.inc()
        return True

    def _take_append_reply(self, rows: Sequence[AppendRow], reply: Any) -> None:
        if self._is_refused("append", reply):
            ids = [row[0] for row in rows]
            self._outbox.forget(ids)
            self._abort([run_name(row[0], row[1]) for row in rows])
            self._to_release += ids
            return
        self._lease.beat()
        outcome = self._outbox.take_answer(rows, read_statuses(reply, len(rows)))
        self._needs_audit |= outcome.broken
        self._abort(outcome.lost)
        self._to_release += outcome.mismatched

    def _abort(self, runs: Sequence[str]) -> None:
        for run in runs:
            self._engine.abort(run)
        if runs:
            self._empty_to_rank = -1

    def _receive(self, budget: ClaimBudget, reply: Any) -> None:
        if self._is_refused("claim", reply):
            self._needs_audit = True  # what it had claimed by then is nobody's work
            return
        self._lease.beat()
        claimed = self._operations.read_claim(reply)
        if budget.requests:
            # The claim did not see what came while its answer was on its way.
            may_be_more = claimed.claims or self._bell.has_rung_since(claimed.bell)
            self._empty_to_rank = -1 if may_be_more else budget.least_urgent.rank
        self._needs_audit |= self._claims.accept(claimed.claims)
        if claimed.more:
            self._wake.set()

    def _after_sweep(self, now: float, reply: Any) -> None:
        regular, self._sweep_again = now >= self._next_sweep, False
        if regular:
            self._next_sweep = now + min(1.0, self._lease_s / 3)
        if self._is_refused("sweep", reply):
            return
        self._lost_redis = False
        swept = self._operations.read_sweep(reply)
        self._metrics.count_sweep(swept)
        if swept.reaped:
            _log.warning("took %d requests from %d dead workers", swept.reaped, swept.workers)
        if swept.failed:
            _log.error("a sweep could not mend %d requests: %s", swept.failed, swept.error)
        if grace_s := swept.grace_ms / 1000:  # a request ends with its last reader's grace
            self._next_sweep = min(self._next_sweep, time.monotonic() + grace_s)
            asyncio.get_running_loop().call_later(grace_s, self._wake.set)
        # No bell rings when the turn of a suspect comes, or of work that had to be left.
        self._empty_to_rank = -1
        if swept.more:  # with the next exchange, so that tokens are not held back
            self._sweep_again = True
            self._wake.set()
        if regular:
            # Requests that produce nothing yet (queued prefill) hear of a cancel only if they ask.
            self._outbox.probe()

    def _show_depth(self, reply: Any) -> None:
        if isinstance(reply, ResponseError):
            return  # gauges only; a worker that may not read them may still serve
        self._metrics.show_depth(self._operations.read_depth(reply))

    async def _release(self) -> None:
        ids, self._to_release = self._to_release, []
        try:
            await self._operations.release(self._worker_id, ids)
        except (RedisError, PenstockError, OSError) as error:
            _log.warning("could not release: %s", error)
            self._needs_audit = True  # finds what stays this worker's without its knowledge

    async def _audit(self) -> None:
        self._turns.beat()
        self._next_audit = time.monotonic() + self._lease_s
        try:
            orphans = await self._operations.audit(self._worker_id, self._owned.epochs)
        except (RedisError, PenstockError, OSError):
            return  # stays due after a broken exchange
        self._needs_audit = False
        if orphans:
            _log.warning("gave back %d requests whose claim this worker never received", orphans)

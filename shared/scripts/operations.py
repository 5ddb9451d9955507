"""The operations of the protocol as typed calls of their Lua scripts.

Each method builds or runs one script of ``scripts/``; what a script does, its keys, arguments and
replies are in the script's own header. A worker's step sends several in one round trip with
:meth:`Operations.run`; everything else awaits one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgpack

from ..errors import IdConflict, QueueFull
from ..protocol import Lane, Reason, Request, State
from .operator_operations import OperatorOperations
from .replies import (
    Append,
    AppendRow,
    AppendStatus,
    Bounds,
    CancelReply,
    Claim,
    ClaimReply,
    DeadLetter,
    RedriveReply,
    RetryPolicy,
    SubmitReply,
    SweepReply,
    accepted,
    read_claims,
)
from .script_loader import Call, Command
from .shard_scripts import SCRIPTS

__all__ = [
    "SCRIPTS",
    "Append",
    "AppendRow",
    "AppendStatus",
    "Bounds",
    "CancelReply",
    "Claim",
    "ClaimReply",
    "DeadLetter",
    "Operations",
    "RedriveReply",
    "RetryPolicy",
    "SubmitReply",
    "SweepReply",
]


_RETRY_AFTER_MS = 1000


class Operations(OperatorOperations):
    """The operations of one shard: of clients, of workers, and, inherited, of operators.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``, or a connection that takes
            encoded commands.
        keys: names of the shard.
        retention_ms: how long the record and the log of an ended request are kept.
        retry: when a request that keeps losing its worker is given up.
        load: where the scripts come from; tests put altered ones in their place.
    """

    async def submit(
        self, request: Request, *, bounds: Bounds, default_deadline_ms: int, inbox: str = ""
    ) -> SubmitReply:
        """Accept a request exactly once.

        Args:
            request: the request.
            bounds: what may wait.
            default_deadline_ms: for a request that names none.
            inbox: publish its output there, together with that of others; empty: in its own
                channel. Not part of the request: of several submits the first decides.

        Raises:
            InvalidRequest: the packed request is too large.
            QueueFull: a bound is reached; nothing was stored.
            IdConflict: the id is known with another payload; nothing was stored.
            RedisUnavailable: the server refuses (for example at maxmemory).
        """
        keys, lane = self._keys, request.lane
        payload = request.pack()
        names = (
            keys.request(request.id), keys.log(request.id), keys.queue(lane, request.tenant),
            keys.tenants(lane), keys.lanes, keys.floors, keys.deadlines, keys.counters, keys.bell,
        )  # fmt: skip
        args = (
            keys.prefix, request.id, lane.value, request.tenant, payload,
            hashlib.sha256(payload).digest()[:16], request.cost_estimate,
            request.output_estimate, request.deadline_ms or default_deadline_ms,
            request.max_queue_ms or 0, self._retention_ms, bounds.requests, bounds.tokens,
            bounds.bytes, bounds.tenant_requests, request.answer.value,
            request.on_disconnect.value, inbox,
        )  # fmt: skip
        reply = await self._one(Call(self._scripts["submit"], names, args))
        verdict = reply[0]
        if verdict == b"ok":
            return SubmitReply(False, State.QUEUED, 0, reply[1])
        if verdict == b"dup":
            return SubmitReply(True, State(reply[1].decode()), reply[2], None)
        if verdict == b"conflict":
            raise IdConflict(request.id)
        raise QueueFull(reply[1].decode(), reply[2], retry_after_ms=_RETRY_AFTER_MS)

    async def cancel(self, request_id: str, reason: Reason = Reason.CLIENT) -> CancelReply:
        """End a request at once, queued or running; harmless if it has ended.

        Raises:
            RedisUnavailable: the server refuses.
        """
        reply = await self._cancel(request_id, reason)
        if reply[0] == b"cancelled":
            return CancelReply(True, State.CANCELLED)
        return CancelReply(False, None if reply[0] == b"unknown" else State(reply[1].decode()))

    async def expire(self, request_id: str) -> bool:
        """End a request if its time is over, as a sweep does: for readers, while no worker lives.

        Returns:
            Whether it has ended, by this call or before.

        Raises:
            RedisUnavailable: the server refuses.
        """
        reply = await self._cancel(request_id, Reason.DEADLINE)
        return reply[0] in (b"expired", b"ended")

    async def _cancel(self, request_id: str, reason: Reason) -> list[Any]:
        keys = self._keys
        names = (keys.request(request_id), keys.log(request_id), keys.deadlines, keys.counters)
        args = (keys.prefix, request_id, reason.value, self._retention_ms)
        reply: list[Any] = await self._one(Call(self._scripts["cancel"], names, args))
        return reply

    async def reader_heartbeat(self, ids: Sequence[str], *, grace_ms: int) -> list[bool]:
        """Say that these requests have a reader, who will say so again within the grace.

        Args:
            ids: at most 256.
            grace_ms: how long to believe it.

        Returns:
            For each, whether it matters: False if it has ended, or goes on without readers.

        Raises:
            RedisUnavailable: the server refuses.
        """
        keys = self._keys
        names = (keys.readers, *(keys.request(id) for id in ids))
        args: tuple[str | int, ...] = (keys.prefix, grace_ms, *ids)
        reply = await self._one(Call(self._scripts["reader_heartbeat"], names, args))
        return [bool(matters) for matters in reply]

    def claim(
        self,
        worker_id: str,
        *,
        lease_ms: int,
        requests: int,
        tokens: int,
        suspect_ok: bool,
        least_urgent: Lane = Lane.BATCH,
    ) -> Call:
        """Ask for up to ``requests`` requests of about ``tokens`` tokens; renews the lease.

        One claim brings no more than this worker's share of what waits, see ``claim.lua``.
        With another ``least_urgent`` than ``batch`` only work of that lane and of those before it
        is given, and no suspects.
        """
        keys = self._keys
        names = (
            keys.continued(Lane.CRITICAL), keys.suspects, keys.lanes, keys.floors,
            keys.tenants(Lane.CRITICAL), keys.tenants(Lane.NORMAL), keys.tenants(Lane.BATCH),
            keys.leases, keys.owned(worker_id), keys.deadlines, keys.counters, keys.bell,
            keys.continued(Lane.NORMAL), keys.continued(Lane.BATCH),
        )  # fmt: skip
        args = (
            keys.prefix, worker_id, lease_ms, requests, tokens, int(suspect_ok),
            self._retention_ms, least_urgent.value,
        )  # fmt: skip
        return Call(self._scripts["claim"], names, args)

    @staticmethod
    def read_claim(reply: Any) -> ClaimReply:
        """The typed form of a claim's reply.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("claim", reply)
        return ClaimReply(reply[1].decode(), read_claims(reply[2]), bool(reply[3]))

    def append(self, worker_id: str, rows: Sequence[AppendRow], *, lease_ms: int) -> Call:
        """Publish tokens and ends of up to 256 requests; renews the lease."""
        keys = self._keys
        names = (keys.leases, keys.owned(worker_id), keys.deadlines, keys.counters)
        # Redis' Lua reader knows msgpack's old raw type only: str and bytes go the same way.
        blob: bytes = msgpack.packb(rows, use_bin_type=False)
        args = (keys.prefix, worker_id, lease_ms, self._retention_ms, blob)
        pairs = [self._key_pair(row[0]) for row in rows]
        return Call(self._scripts["append"], names, args, pairs)

    def sweep(self, *, lease_ms: int) -> Call:
        """Expire what is past its deadline and take work from dead workers.

        Args:
            lease_ms: lease of the worker that sweeps: after an outage so long, nobody is dead yet.
        """
        keys, retry = self._keys, self._retry
        names = (
            keys.deadlines, keys.leases, keys.continued(Lane.CRITICAL), keys.suspects,
            keys.counters, keys.dead_letters, keys.bell, keys.floors, keys.readers,
            keys.continued(Lane.NORMAL), keys.continued(Lane.BATCH),
        )  # fmt: skip
        args = (keys.prefix, retry.max_blames, retry.max_attempts, self._retention_ms, lease_ms)
        return Call(self._scripts["sweep"], names, args)

    @staticmethod
    def read_sweep(reply: Any) -> SweepReply:
        """The typed form of a sweep's reply.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("sweep", reply)
        expired, reaped, workers, repaired, failed, error, abandoned, more = reply
        why = error.decode(errors="replace")
        return SweepReply(expired, reaped, workers, repaired, failed, why, abandoned, bool(more))

    def depth(self) -> Command:
        """Ask for the counters of waiting work."""
        fields = [f"{kind}:{lane}" for kind in ("requests", "tokens") for lane in Lane]
        return Command(("HMGET", self._keys.counters, *fields))

    @staticmethod
    def read_depth(reply: Any) -> dict[Lane, tuple[int, int]]:
        """Waiting requests and their estimated tokens, by lane.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("HMGET", reply)
        counts = [int(value or 0) for value in reply]
        pairs = zip(counts[: len(Lane)], counts[len(Lane) :], strict=True)
        return dict(zip(Lane, pairs, strict=True))

    async def release_all(self, worker_id: str, *, blame: bool, died: bool = False) -> int:
        """Give back everything a worker owns and forget the worker; returns how many.

        Args:
            worker_id: the worker.
            blame: it crashed, perhaps by what it owned.
            died: it was killed from outside. That blames nobody, but is counted: a request
                for whose memory the system kills its workers must end some time.
        """
        loss = 1 if blame else 2 if died else 0
        return await self._hand_back("release", worker_id, ("all", loss), ())

    async def release(self, worker_id: str, ids: Collection[str]) -> int:
        """Give back these requests, without blame; returns how many the worker owned."""
        return await self._hand_back("release", worker_id, ("only", 0), ids)

    async def audit(self, worker_id: str, known: Mapping[str, int]) -> int:
        """Give back what Redis thinks the worker owns, by claims that the worker does not know.

        Heals a claim whose reply was lost with its connection; returns how many there were.

        Args:
            worker_id: the worker.
            known: epochs of the claims it knows of, by request.
        """
        claims = [part for claim in known.items() for part in claim]
        return await self._hand_back("audit", worker_id, (), claims)

    async def _hand_back(
        self, script: str, worker_id: str, how: tuple[str | int, ...], what: Collection[str | int]
    ) -> int:
        keys, retry = self._keys, self._retry
        names = (
            keys.owned(worker_id), keys.leases, keys.continued(Lane.CRITICAL), keys.suspects,
            keys.deadlines, keys.counters, keys.dead_letters, keys.bell,
            keys.continued(Lane.NORMAL), keys.continued(Lane.BATCH),
        )  # fmt: skip
        args: tuple[str | int, ...] = (
            keys.prefix, worker_id, *how, retry.max_blames, retry.max_attempts,
            self._retention_ms, *what,
        )  # fmt: skip
        call = Call(self._scripts[script], names, args)
        total, more = 0, 1
        while more:
            count, more = await self._one(call)
            total += count
        return total

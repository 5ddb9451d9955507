"""The operations of clients and workers, as typed calls of their Lua scripts.

What a script does, and its keys, arguments and replies, are in the script's own header. A worker's
step sends several calls in one round trip with :meth:`Operations.run`; the other methods await one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgpack

from ..errors import IdConflict, QueueFull
from ..keys import Keys
from ..protocol.request import Request
from ..protocol.states import Lane, Reason, State
from ..redis.resp import Exchanger
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
from .script_header import Value
from .script_loader import Call, Command, Pipelined, Script, load_script

__all__ = [
    "DAY_MS",
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
    "request_arguments",
]


_LEAST_RETRY_MS = 1000
_IDS_PER_CALL = 256

DAY_MS = 86_400_000
"""A day of the usage ledger, which is one of UTC."""


class Operations(OperatorOperations):
    """The operations of one shard: of clients, of workers, and, inherited, of operators.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``, or a connection that takes
            encoded commands.
        keys: names of the shard.
        retention_ms: how long the record and the log of an ended request are kept.
        retry: when a request that keeps losing its worker is given up.
        fingerprint: of the model that this worker serves; empty: it is no worker, or continues
            streams of any model.
        usage_retention_ms: how long a day's usage ledger is kept after the day.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self,
        redis: Pipelined | Exchanger,
        keys: Keys,
        *,
        retention_ms: int = 600_000,
        retry: RetryPolicy | None = None,
        fingerprint: str = "",
        usage_retention_ms: int = 400 * DAY_MS,
        load: Callable[[str], Script] = load_script,
    ) -> None:
        super().__init__(redis, keys, retention_ms=retention_ms, load=load)
        self._fingerprint = fingerprint
        policy = retry or RetryPolicy()
        self._usage_retention_ms = usage_retention_ms
        self._policy: dict[str, Value] = {
            "max_blames": policy.max_blames,
            "max_attempts": policy.max_attempts,
            "retention_ms": retention_ms,
        }

    async def submit(
        self,
        request: Request,
        *,
        bounds: Bounds,
        default_deadline_ms: int,
        inbox: str = "",
        note: bytes = b"",
        reader_grace_ms: int = 0,
    ) -> SubmitReply:
        """Accept a request exactly once.

        Args:
            request: the request.
            bounds: what may wait.
            default_deadline_ms: for a request that names none.
            inbox: publish its output there, together with that of others; empty: in its own
                channel. Not part of the request: of several submits the first decides.
            note: kept in the record. With another note the same request is a conflict.
            reader_grace_ms: for a request that ends when its last reader leaves, how long it counts
                as having one from now on. 0: not before a reader says so.

        Raises:
            InvalidRequest: the packed request is too large.
            QueueFull: a bound is reached; nothing was stored.
            IdConflict: the id is known with another payload; nothing was stored.
            RedisUnavailable: the server refuses (for example at maxmemory).
        """
        payload = request.pack()
        values = request_arguments(request, payload, bounds, default_deadline_ms)
        if note:
            values["digest"] = hashlib.sha256(payload + note).digest()[:16]
        retention_ms = request.retention_ms or self._retention_ms
        calls = [
            self._call(
                "submit", retention_ms=retention_ms, inbox=inbox, note=note, **values
            )
        ]  # fmt: skip
        if reader_grace_ms:
            # In the same round trip: a client that dies before its first heartbeat was a reader.
            calls.append(self._heartbeat([request.id], reader_grace_ms, inbox))
        reply, *_ = await self.run(calls)
        accepted("submit", reply)
        verdict = reply[0]
        if verdict == b"ok":
            return SubmitReply(False, State.QUEUED, 0, reply[1], reply[2])
        if verdict == b"dup":
            return SubmitReply(True, State(reply[1].decode()), reply[2], None, reply[3])
        if verdict == b"conflict":
            raise IdConflict(request.id)
        wait_ms = max(_LEAST_RETRY_MS, reply[3])
        raise QueueFull(reply[1].decode(), reply[2], retry_after_ms=wait_ms)

    async def cancel(self, request_id: str, reason: Reason = Reason.CLIENT) -> CancelReply:
        """End a request at once, queued or running; harmless if it has ended.

        With the reason ``disconnected`` a request goes on that another process has read: it ends
        when its last reader has left.

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
        reply: list[Any] = await self._one(
            "cancel", id=request_id, reason=reason.value, retention_ms=self._retention_ms
        )
        return reply

    async def reader_heartbeat(
        self, ids: Sequence[str], *, grace_ms: int, inbox: str = ""
    ) -> list[bool]:
        """Say that these requests have a reader, which says so again within the grace.

        Args:
            ids: any number; they go in one round trip, 256 a script.
            grace_ms: how long the reader counts as there.
            inbox: of the reader's process; empty if it has none.

        Returns:
            For each, whether it matters: False if it has ended, or goes on without readers.

        Raises:
            RedisUnavailable: the server refuses.
        """
        replies = await self.run(
            [
                self._heartbeat(ids[at : at + _IDS_PER_CALL], grace_ms, inbox)
                for at in range(0, len(ids), _IDS_PER_CALL)
            ]
        )
        for reply in replies:
            accepted("reader_heartbeat", reply)
        return [bool(matters) for reply in replies for matters in reply]

    def _heartbeat(self, ids: Sequence[str], grace_ms: int, inbox: str) -> Call:
        return self._call("reader_heartbeat", grace_ms=grace_ms, inbox=inbox, ids=ids)

    async def register(self, *, lease_ms: int, rolling: bool) -> str | None:
        """Say, before the first claim, which model this worker serves.

        Args:
            lease_ms: how long this counts; each sweep of the worker says it again.
            rolling: serve it even beside workers of another model.

        Returns:
            None, or the fingerprint of another model that is being served: then this worker must
            not serve.

        Raises:
            RedisUnavailable: the server refuses.
        """
        reply = await self._one(
            "register", fingerprint=self._fingerprint, lease_ms=lease_ms, rolling=int(rolling)
        )
        return None if reply[0] == b"ok" else str(reply[1].decode())

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
        With another ``least_urgent`` than ``batch`` it brings only work of that lane and of more
        urgent ones, and no suspects.
        """
        return self._call(
            "claim", worker=worker_id, lease_ms=lease_ms, requests=requests, tokens=tokens,
            suspect=int(suspect_ok), retention_ms=self._retention_ms,
            least_urgent=least_urgent.value, fingerprint=self._fingerprint,
        )  # fmt: skip

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
        # Redis' Lua reader knows msgpack's old raw type only: str and bytes go the same way.
        blob: bytes = msgpack.packb(rows, use_bin_type=False)
        return self._call(
            "append", [self._key_pair(row[0]) for row in rows], worker=worker_id,
            lease_ms=lease_ms, retention_ms=self._retention_ms, rows=blob,
        )  # fmt: skip

    def sweep(self, *, lease_ms: int, spare_readers: bool = False) -> Call:
        """Expire what is past its deadline and take work from dead workers.

        Args:
            lease_ms: lease of the worker that sweeps. After an outage it spares other workers for
                one lease.
            spare_readers: the worker has just lost Redis, and so may readers: they get time to say
                that they are there.
        """
        return self._call(
            "sweep", lease_ms=lease_ms, fingerprint=self._fingerprint,
            usage_retention_ms=self._usage_retention_ms, spare_readers=int(spare_readers),
            **self._policy,
        )  # fmt: skip

    @staticmethod
    def read_sweep(reply: Any) -> SweepReply:
        """The typed form of a sweep's reply.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("sweep", reply)
        expired, reaped, workers, repaired, failed, error, abandoned, more, *rest = reply
        why = error.decode(errors="replace")
        return SweepReply(
            expired, reaped, workers, repaired, failed, why, abandoned, bool(more), *rest
        )

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
            blame: it crashed, perhaps because of a request it owned.
            died: it was killed from outside. No request is blamed, but the loss counts: a request
                for whose memory the system kills its workers must end some time.
        """
        loss = 1 if blame else 2 if died else 0
        return await self._give_back("release", worker=worker_id, mode="all", loss=loss, ids=())

    async def release(self, worker_id: str, ids: Collection[str]) -> int:
        """Give back these requests, without blame; returns how many the worker owned."""
        return await self._give_back(
            "release", worker=worker_id, mode="only", loss=0, ids=tuple(ids)
        )

    async def audit(self, worker_id: str, known: Mapping[str, int]) -> int:
        """Give back what Redis says the worker owns by claims that the worker does not know.

        Heals a claim whose reply was lost with its connection; returns how many there were.

        Args:
            worker_id: the worker.
            known: epochs of the claims it knows of, by request.
        """
        claims = [part for claim in known.items() for part in claim]
        return await self._give_back("audit", worker=worker_id, known=claims)

    async def _give_back(self, script: str, **values: Value) -> int:
        total, more = 0, 1
        while more:
            count, more = await self._one(script, **values, **self._policy)
            total += count
        return total


def request_arguments(
    request: Request, payload: bytes, bounds: Bounds, default_deadline_ms: int
) -> dict[str, Value]:
    """The arguments that describe a request, of the scripts that accept one."""
    return {
        "id": request.id,
        "lane": request.lane.value,
        "tenant": request.tenant,
        "payload": payload,
        "digest": hashlib.sha256(payload).digest()[:16],
        "cost": request.cost_estimate,
        "output_cost": request.output_estimate,
        "deadline_ms": request.deadline_ms or default_deadline_ms,
        "max_queue_ms": request.max_queue_ms or 0,
        "max_requests": bounds.requests,
        "max_tokens": bounds.tokens,
        "max_bytes": bounds.bytes,
        "max_tenant_requests": bounds.tenant_requests,
        "tenant_share": bounds.tenant_share,
        "answer": request.answer.value,
        "on_disconnect": request.on_disconnect.value,
    }

"""The operations of the protocol as typed calls of their Lua scripts.

Each method builds or runs one script of ``scripts/``; what a script does, its keys, arguments and
replies are in the script's own header. A worker's step sends several in one round trip with
:meth:`Operations.run`; everything else awaits one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from redis.exceptions import ResponseError

from .errors import IdConflict, PenstockError, QueueFull, RedisUnavailable
from .keys import Keys
from .protocol import Chunk, Lane, Reason, Request, State, unpack_event
from .script_loader import Call, Pipelined, load_script, run_calls

__all__ = [
    "Append",
    "AppendStatus",
    "Bounds",
    "CancelReply",
    "Claim",
    "ClaimReply",
    "Operations",
    "RetryPolicy",
    "SubmitReply",
    "SweepReply",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What may wait at the door; 0 means no bound.

    Attributes:
        requests: waiting requests of the shard.
        tokens: their estimated cost in tokens.
        bytes: their packed size in bytes.
        tenant_requests: waiting requests of any one tenant.
    """

    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    tenant_requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a request that keeps losing its worker is given up.

    Attributes:
        max_blames: crashes it may be blamed for (no progress since its claim).
        max_attempts: claims in all.
    """

    max_blames: int = 5
    max_attempts: int = 20


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """Answer to an accepted submit.

    Attributes:
        duplicate: the same id and payload were accepted before; nothing was changed.
        state: its state now.
        n: output tokens so far.
        waiting: requests now waiting in the shard; None for a duplicate.
    """

    duplicate: bool
    state: State
    n: int
    waiting: int | None


@dataclass(frozen=True, slots=True)
class CancelReply:
    """Answer to a cancel.

    Attributes:
        changed: this call ended it.
        state: the terminal state; None if the request is not known.
    """

    changed: bool
    state: State | None


@dataclass(frozen=True, slots=True)
class Claim:
    """One request given to a worker. Times are in ms of Redis' clock.

    Attributes:
        id: the request.
        epoch: fencing token for every write about it.
        attempts: claims so far, this one included.
        suspect: it may have crashed a worker; run one such at a time.
        payload: the packed request.
        age_ms: since acceptance.
        queue_ms: acceptance to first claim.
        ttft_ms: acceptance to first published token, None if there was none yet.
        deadline_in_ms: until it expires.
        chunks: what is already published; empty for fresh work.
    """

    id: str
    epoch: int
    attempts: int
    suspect: bool
    payload: bytes
    age_ms: int
    queue_ms: int
    ttft_ms: int | None
    deadline_in_ms: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """What :meth:`Operations.claim` brought.

    Attributes:
        bell: id of the last bell entry; a worker that got nothing waits for a later one.
        claims: the requests, in the order to serve them.
    """

    bell: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Append:
    """Tokens and/or the end of one running request.

    Attributes:
        id: the request.
        epoch: from its claim.
        start: output index of the first token (for a bare end: the count of tokens).
        count: number of tokens.
        chunk: packed chunk; empty if count is 0.
        end: packed end; empty if the request goes on.
        reason: why it ended, if it did.
        spent: tokens really spent, if it ended; -1 if unknown.
    """

    id: str
    epoch: int
    start: int
    count: int
    chunk: bytes = b""
    end: bytes = b""
    reason: Reason | None = None
    spent: int = -1


class AppendStatus:
    """Statuses of :meth:`Operations.append`."""

    WRITTEN = 0
    FENCED = 2
    MISMATCH = 3
    GONE = 4
    BROKEN = 9


@dataclass(frozen=True, slots=True)
class SweepReply:
    """What a sweep did: requests expired, requests taken from dead workers, dead workers."""

    expired: int
    reaped: int
    workers: int


class Operations:
    """The scripts of one shard.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``.
        keys: names of the shard.
        retention_ms: how long the record and the log of an ended request are kept.
        retry: when a request that keeps losing its worker is given up.
    """

    def __init__(
        self,
        redis: Pipelined,
        keys: Keys,
        *,
        retention_ms: int = 600_000,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._retention_ms = retention_ms
        self._retry = retry or RetryPolicy()
        names = ("submit", "claim", "append", "cancel", "release", "sweep")
        self._scripts = {name: load_script(name) for name in names}

    @property
    def keys(self) -> Keys:
        """Names of the shard."""
        return self._keys

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls in one round trip; replies are raw, see :func:`run_calls`."""
        return await run_calls(self._redis, calls)

    async def _one(self, call: Call) -> Any:
        (reply,) = await self.run([call])
        if isinstance(reply, ResponseError):
            raise script_error(call.script.name, reply) from reply
        return reply

    async def submit(
        self, request: Request, *, bounds: Bounds, default_deadline_ms: int
    ) -> SubmitReply:
        """Accept a request exactly once.

        Raises:
            InvalidRequest: the packed request is too large.
            QueueFull: a bound is reached; nothing was stored.
            IdConflict: the id is known with another payload; nothing was stored.
            RedisUnavailable: the server refuses (for example at maxmemory).
        """
        keys, lane = self._keys, request.lane
        payload = request.pack()
        names = (
            keys.request(request.id), keys.queue(lane, request.tenant), keys.tenants(lane),
            keys.lanes, keys.floors, keys.deadlines, keys.counters, keys.bell,
        )  # fmt: skip
        args = (
            keys.prefix, request.id, lane.value, request.tenant, payload,
            hashlib.sha256(payload).digest()[:16], request.cost_estimate,
            request.deadline_ms or default_deadline_ms, request.max_queue_ms or 0,
            self._retention_ms, bounds.requests, bounds.tokens, bounds.bytes,
            bounds.tenant_requests,
        )  # fmt: skip
        reply = await self._one(Call(self._scripts["submit"], names, args))
        verdict = reply[0]
        if verdict == b"ok":
            return SubmitReply(False, State.QUEUED, 0, reply[1])
        if verdict == b"dup":
            return SubmitReply(True, State(reply[1].decode()), reply[2], None)
        if verdict == b"conflict":
            raise IdConflict(request.id)
        raise QueueFull(reply[1].decode(), reply[2], retry_after_ms=1000)

    async def cancel(self, request_id: str, reason: Reason = Reason.CLIENT) -> CancelReply:
        """End a request at once, queued or running; harmless if it has ended.

        Raises:
            RedisUnavailable: the server refuses.
        """
        keys = self._keys
        names = (keys.request(request_id), keys.log(request_id), keys.deadlines, keys.counters)
        args = (keys.prefix, request_id, reason.value, self._retention_ms)
        reply = await self._one(Call(self._scripts["cancel"], names, args))
        if reply[0] == b"cancelled":
            return CancelReply(True, State.CANCELLED)
        return CancelReply(False, None if reply[0] == b"unknown" else State(reply[1].decode()))

    def claim(
        self, worker_id: str, *, lease_ms: int, requests: int, tokens: int, suspect_ok: bool
    ) -> Call:
        """Ask for up to ``requests`` requests of about ``tokens`` tokens; renews the lease."""
        keys = self._keys
        names = (
            keys.continued, keys.suspects, keys.lanes, keys.floors, keys.tenants(Lane.CRITICAL),
            keys.tenants(Lane.NORMAL), keys.tenants(Lane.BATCH), keys.leases,
            keys.owned(worker_id), keys.deadlines, keys.counters, keys.bell,
        )  # fmt: skip
        args = (keys.prefix, worker_id, lease_ms, requests, tokens, int(suspect_ok))
        return Call(self._scripts["claim"], names, args)

    @staticmethod
    def read_claim(reply: Any) -> ClaimReply:
        """The typed form of a claim's reply."""
        return ClaimReply(reply[1].decode(), tuple(_claim(row) for row in reply[2]))

    def append(self, worker_id: str, items: Sequence[Append], *, lease_ms: int) -> Call:
        """Publish tokens and ends of up to 256 requests; renews the lease."""
        keys = self._keys
        names: list[str | bytes] = [
            keys.leases, keys.owned(worker_id), keys.deadlines, keys.counters,
        ]  # fmt: skip
        rows = []
        for item in items:
            names += (keys.request(item.id), keys.log(item.id))
            reason = item.reason
            state = reason.state.value if reason else ""
            rows.append(
                (item.id, item.epoch, item.start, item.count, item.chunk, item.end, state,
                 reason.value if reason else "", item.spent)
            )  # fmt: skip
        # Redis' Lua reader knows msgpack's old raw type only: str and bytes go the same way.
        blob = msgpack.packb(rows, use_bin_type=False)
        args = (keys.prefix, worker_id, lease_ms, self._retention_ms, blob)
        return Call(self._scripts["append"], names, args)

    def sweep(self) -> Call:
        """Expire what is past its deadline and take work from dead workers."""
        keys, retry = self._keys, self._retry
        names = (
            keys.deadlines, keys.leases, keys.continued, keys.suspects, keys.counters,
            keys.dead_letters, keys.bell,
        )  # fmt: skip
        args = (keys.prefix, retry.max_blames, retry.max_attempts, self._retention_ms)
        return Call(self._scripts["sweep"], names, args)

    @staticmethod
    def read_sweep(reply: Any) -> SweepReply:
        """The typed form of a sweep's reply."""
        return SweepReply(*reply)

    async def release_all(self, worker_id: str, *, blame: bool) -> int:
        """Give back everything a worker owns and forget the worker; returns how many."""
        return await self._release(worker_id, "all", (), blame)

    async def release(self, worker_id: str, ids: Collection[str]) -> int:
        """Give back these requests, without blame; returns how many the worker owned."""
        return await self._release(worker_id, "only", ids, False)

    async def audit(self, worker_id: str, known: Collection[str]) -> int:
        """Give back what Redis thinks the worker owns and the worker does not know.

        Heals a claim whose reply was lost with its connection; returns how many there were.
        """
        return await self._release(worker_id, "except", known, False)

    async def _release(self, worker_id: str, mode: str, ids: Collection[str], blame: bool) -> int:
        keys, retry = self._keys, self._retry
        names = (
            keys.owned(worker_id), keys.leases, keys.continued, keys.suspects, keys.deadlines,
            keys.counters, keys.dead_letters, keys.bell,
        )  # fmt: skip
        args: tuple[str | int, ...] = (
            keys.prefix, worker_id, mode, int(blame), retry.max_blames, retry.max_attempts,
            self._retention_ms, *ids,
        )  # fmt: skip
        return int(await self._one(Call(self._scripts["release"], names, args)))


def script_error(name: str, error: ResponseError) -> PenstockError:
    """A server's refusal of a script as an error that says what to do."""
    text = str(error)
    # 6.2 wraps the reason of an out-of-memory refusal in another error; match on the text too.
    if "OOM" in text or "used memory" in text:
        return RedisUnavailable(
            "Redis is at maxmemory and accepts no new work; wait until requests end, or raise "
            "maxmemory"
        )
    if "NOPERM" in text or "ACL" in text:
        return RedisUnavailable(f"Redis denies a command of {name}: {text}; see docs/protocol.md")
    return RedisUnavailable(f"Redis refused {name}: {text}")


def _claim(row: Sequence[Any]) -> Claim:
    events = [unpack_event(fields[1]) for _, fields in row[10] if fields[0] == b"d"]
    return Claim(
        id=row[0].decode(),
        epoch=row[1],
        attempts=row[3],
        suspect=bool(row[4]),
        payload=row[5],
        age_ms=row[6],
        queue_ms=row[7],
        ttft_ms=None if row[8] < 0 else row[8],
        deadline_in_ms=row[9],
        chunks=tuple(event for event in events if isinstance(event, Chunk)),
    )

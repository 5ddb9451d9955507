"""What the operations of :mod:`.operations` take and give, as typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import ResponseError

from ..errors import PenstockError, ProtocolError, RedisUnavailable
from ..protocol.event_reader import unpack_event
from ..protocol.events import Chunk
from ..protocol.states import Lane, Reason, State
from ..redis.resp import field_pairs

if TYPE_CHECKING:
    from ..settings import QueueSettings  # takes longer to load than all the rest of the client

__all__ = [
    "Append", "AppendRow", "AppendStatus", "Bounds", "CancelReply", "Claim", "ClaimReply",
    "DeadLetter", "RedriveReply", "RetryPolicy", "SubmitReply", "SweepReply", "Used", "accepted",
    "read_claims", "read_dead_letter", "read_statuses",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on what may wait; 0 means no bound.

    Attributes:
        requests: waiting requests of the shard.
        tokens: their estimated cost in tokens.
        bytes: their packed size in bytes.
        tenant_requests: waiting requests of any one tenant.
        tenant_share: what a tenant may hold of each of the first three, in percent of the room
            that is free, times its lane's weight.
    """

    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    tenant_requests: int = 0
    tenant_share: int = 0

    @classmethod
    def of(cls, queue: QueueSettings) -> Bounds:
        """Return the bounds that settings ask for."""
        return cls(
            requests=queue.max_queued_requests,
            tokens=queue.max_queued_tokens,
            bytes=int(queue.max_queued_bytes),
            tenant_requests=queue.max_tenant_requests,
            tenant_share=queue.tenant_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a request that keeps losing its worker is given up.

    Attributes:
        max_blames: workers in a row that may die with it without its making progress.
        max_attempts: workers in all that may die with it.
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
        accepted_at: when it was first accepted, in ms of Redis' clock.
    """

    duplicate: bool
    state: State
    n: int
    waiting: int | None
    accepted_at: int


@dataclass(frozen=True, slots=True)
class CancelReply:
    """Answer to a cancel.

    Attributes:
        changed: this call ended it.
        state: the state now; None if the request is not known.
    """

    changed: bool
    state: State | None


class Used(NamedTuple):
    """What a request has used so far, over all its claims: the field ``usage`` of its record.

    Attributes:
        prompt_tokens: tokens of its prompt.
        cached_tokens: of these, reused and not computed.
        drafted_tokens: tokens that were drafted for it, accepted or not.
        device_us: its share of the device's time in microseconds.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    device_us: int = 0

    def pack(self) -> str:
        """As the scripts take it."""
        return " ".join(map(str, self))

    @classmethod
    def unpack(cls, packed: bytes) -> Used:
        """What a script gave; nothing used if a record written by hand holds no counts."""
        words = packed.split()
        if len(words) != len(cls._fields) or not all(word.isdigit() for word in words):
            return cls()
        return cls(*map(int, words))


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
        n: tokens already published.
        chunks: these tokens; empty for fresh work.
        used: what its earlier workers have told of its usage.
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
    n: int = 0
    used: Used = Used()  # noqa: RUF009 - a tuple

    @property
    def intact(self) -> bool:
        """Whether the chunks cover ``[0, n)``; see the class."""
        at = 0
        for chunk in self.chunks:
            if chunk.start != at:
                return False
            at = chunk.stop
        return at == self.n


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """What :meth:`Operations.claim` brought.

    Attributes:
        bell: id of the last bell entry; a worker that got nothing waits for a later one.
        claims: the requests, in the order to serve them.
        more: the reply stopped at the worker's share of what waits. A worker with room should ask
            again at once.
    """

    bell: str
    claims: tuple[Claim, ...]
    more: bool


class Append(NamedTuple):
    """Tokens and/or the end of one running request: a row as the script takes it.

    Code that makes one for every token makes a plain, short tuple instead: :data:`AppendRow`.

    Attributes:
        id: the request.
        epoch: from its claim.
        start: output index of the first token (for a bare end: the count of tokens).
        num_tokens: number of tokens.
        chunk: packed chunk; empty if there are no tokens.
        end: packed end; empty if the request goes on.
        state: its terminal state, if it ended.
        reason: why it ended, if it did.
        spent: tokens really spent, if it ended; -1 if unknown.
        used: what it has used so far, packed; empty: as told before. Comes with tokens.
    """

    id: str
    epoch: int
    start: int
    num_tokens: int
    chunk: bytes = b""
    end: bytes = b""
    state: str = ""
    reason: str = ""
    spent: int = -1
    used: str = ""


AppendRow = Append | tuple[str, int, int, int, bytes]
"""An :class:`Append`, or only the beginning of one, for a request that goes on.

There is one for every token. The bare tuple takes a fifth of the time to make, and half of the time
to pack.
"""


class AppendStatus:
    """Statuses of :meth:`Operations.append`."""

    WRITTEN = 0
    FENCED = 2
    MISMATCH = 3
    GONE = 4
    BROKEN = 9


@dataclass(frozen=True, slots=True)
class SweepReply:
    """What a sweep did.

    Attributes:
        expired: requests ended past their deadline or their time in the queue.
        reaped: requests taken from dead workers.
        workers: dead workers forgotten.
        repaired: requests put right that a cut script or a key deleted by hand had left wrong.
        failed: requests that the sweep could not handle, and will try again.
        error: why, for the last of them.
        abandoned: requests cancelled because all their readers had left.
        more: it did as much as one sweep may: sweep again at once.
        orphans: streams ended because no worker serves the model any more that began them.
        grace_ms: until the next reader's grace may end; 0: no request ends with its reader.
    """

    expired: int
    reaped: int
    workers: int
    repaired: int = 0
    failed: int = 0
    error: str = ""
    abandoned: int = 0
    more: bool = False
    orphans: int = 0
    grace_ms: int = 0


@dataclass(frozen=True, slots=True)
class RedriveReply:
    """Answer to a redrive.

    Attributes:
        done: the request is queued again.
        state: if not done: the state in which its id is in use again; None if there is no such
            dead letter.
    """

    done: bool
    state: State | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A request that ended ``dead``, kept to be looked at and redriven.

    Attributes:
        entry: name of this dead letter; what redrive and drop take.
        id: the request.
        reason: ``poison`` or ``attempts``.
        at_ms: when it ended, Redis time in ms since 1970.
        attempts: how often it was claimed.
        blames: workers in a row that died with it without its making progress.
        n: tokens it had published.
        lane: how urgent it was.
        tenant: to which its tokens count.
        payload: the packed request.
    """

    entry: str
    id: str
    reason: Reason
    at_ms: int
    attempts: int
    blames: int
    n: int
    lane: Lane
    tenant: str
    payload: bytes


def accepted(name: str, reply: Any) -> None:
    """Raise if a reply is the server's refusal.

    Raises:
        RedisUnavailable: it is.
    """
    if isinstance(reply, ResponseError):
        raise script_error(name, reply) from reply


def script_error(name: str, error: ResponseError) -> PenstockError:
    """A server's refusal of a script as an error that says what to do."""
    text = str(error)
    # 6.2 wraps the reason of an out-of-memory refusal in another error; match on the text too.
    if "OOM" in text or "used memory" in text:
        return RedisUnavailable(
            "Redis is at maxmemory and accepts no new work; wait until requests end, or raise "
            "maxmemory"
        )
    if any(word in text for word in ("NOPERM", "ACL", "can't run this command")):
        return RedisUnavailable(f"Redis denies a command of {name}: {text}; see docs/protocol.md")
    if "read only replica" in text:
        return RedisUnavailable(
            f"Redis refused {name}: the server is a read only replica; point REDIS_URL or --redis "
            "to its primary"
        )
    return RedisUnavailable(f"Redis refused {name}: {text}")


def read_statuses(reply: Sequence[int], count: int) -> Sequence[int]:
    """A status for each of the ``count`` items of an append, from the script's reply."""
    return reply[0::2] if reply else [AppendStatus.WRITTEN] * count


def read_claims(rows: Sequence[Sequence[Any]]) -> tuple[Claim, ...]:
    """The typed form of the claims in a reply of the script ``claim``."""
    return tuple(_claim(row) for row in rows)


def _claim(row: Sequence[Any]) -> Claim:
    events = []
    for _, fields in row[10]:
        # A damaged entry is a gap, which its own request's `intact` tells; no other may suffer.
        try:
            events.append(unpack_event(fields[1]))
        except ProtocolError:
            continue
    return Claim(
        id=row[0].decode(),
        epoch=row[1],
        n=row[2],
        attempts=row[3],
        suspect=bool(row[4]),
        payload=row[5],
        age_ms=row[6],
        queue_ms=row[7],
        ttft_ms=None if row[8] < 0 else row[8],
        deadline_in_ms=row[9],
        chunks=tuple(event for event in events if isinstance(event, Chunk)),
        used=Used.unpack(row[11]),
    )


def read_dead_letter(entry: bytes, reply: Mapping[bytes, bytes] | Sequence[bytes]) -> DeadLetter:
    """The typed form of an entry of the stream of dead letters; see :func:`field_pairs`."""
    fields = dict(field_pairs(reply))
    return DeadLetter(
        entry=entry.decode(),
        id=fields[b"id"].decode(),
        reason=Reason(fields[b"reason"].decode()),
        at_ms=int(entry.partition(b"-")[0]),
        attempts=int(fields[b"attempts"]),
        blames=int(fields[b"blames"]),
        n=int(fields[b"tokens"]),
        lane=Lane(fields[b"lane"].decode()),
        tenant=fields[b"tenant"].decode(),
        payload=fields[b"payload"],
    )

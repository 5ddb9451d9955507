"""A shard on a real server, and workers that do what they are told, for tests of delivery."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from delivery.recount import violations
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from waiting import wait_until_async

from penstock.shared.keys import Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, Usage, rolling_digest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason
from penstock.shared.scripts.compaction import compacted
from penstock.shared.scripts.log_operations import LogOperations
from penstock.shared.scripts.operations import (
    Append,
    Bounds,
    Claim,
    ClaimReply,
    Operations,
    RetryPolicy,
    SubmitReply,
    SweepReply,
)
from penstock.shared.scripts.script_loader import Call, Script, load_script

MINUTE_MS = 60_000
NO_BOUNDS = Bounds()
NO_USAGE = Usage()
"""Stands for one that names the output tokens alone."""


def token(request_id: str, index: int) -> int:
    """What every worker generates for a request at an index."""
    return zlib.crc32(f"{request_id}:{index}".encode()) & 0xFFFF


def chunk(request_id: str, start: int, count: int) -> Chunk:
    ids = [token(request_id, i) for i in range(start + count)]
    text = "".join(f"{i}." for i in ids[start:])
    return Chunk(start, tuple(ids[start:]), text, rolling_digest(ids))


def request(request_id: str, *, prompt: str = "hi", max_tokens: int = 8, **fields: Any) -> Request:
    return Request(
        id=request_id,
        prompt=prompt,
        options=SamplingOptions(max_tokens=max_tokens),
        **fields,
    )


@dataclass
class Shard:
    """Operations of one shard, and shortcuts to look into it."""

    redis: Redis
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    load: Callable[[str], Script] = load_script
    keys: Keys = field(default_factory=lambda: Keys("demo"))
    retention_ms: int = 600_000
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.ops = Operations(
            self.redis, self.keys, retention_ms=self.retention_ms, retry=self.retry,
            load=self.load, fingerprint=self.fingerprint,
        )  # fmt: skip
        self.logs = LogOperations(self.redis, self.keys, load=self.load)

    def with_retry(self, **values: int) -> Shard:
        return Shard(self.redis, RetryPolicy(**values), self.load, self.keys, self.retention_ms)

    def with_retention(self, milliseconds: int) -> Shard:
        return Shard(self.redis, self.retry, self.load, self.keys, milliseconds)

    def with_client(self, redis: Redis) -> Shard:
        return Shard(redis, self.retry, self.load, self.keys, self.retention_ms)

    def with_model(self, fingerprint: str) -> Shard:
        return replace(self, fingerprint=fingerprint)

    def worker(self, name: str, *, lease_ms: int = MINUTE_MS) -> FakeWorker:
        return FakeWorker(self, name, lease_ms)

    async def call(self, call: Call) -> Any:
        (reply,) = await self.ops.run([call])
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def submit(
        self, request_id: str, *, bounds: Bounds = NO_BOUNDS, inbox: str = "", **fields: Any
    ) -> SubmitReply:
        return await self.ops.submit(
            request(request_id, **fields),
            bounds=bounds,
            default_deadline_ms=MINUTE_MS,
            inbox=inbox,
        )

    async def sweep(self, lease_ms: int = MINUTE_MS, *, spare_readers: bool = False) -> SweepReply:
        call = self.ops.sweep(lease_ms=lease_ms, spare_readers=spare_readers)
        return self.ops.read_sweep(await self.call(call))

    async def sweep_until(
        self, done: Callable[[SweepReply], bool], lease_ms: int = MINUTE_MS
    ) -> SweepReply:
        """Sweep until one sweep answers as wanted; leases and deadlines are a few ms here."""
        for _ in range(5000):
            swept = await self.sweep(lease_ms)
            if done(swept):
                return swept
            await asyncio.sleep(0.001)
        raise AssertionError(f"the last of many sweeps answered {swept}")

    async def reap(self) -> SweepReply:
        """Sweep until a lease has ended."""
        return await self.sweep_until(lambda swept: swept.workers > 0)

    async def let_pass(self, milliseconds: int) -> None:
        """As if so much time had passed without a sweep."""
        await self.redis.hset(self.keys.sweep, "swept_at", await self.now_ms() - milliseconds)

    async def record(self, request_id: str) -> dict[str, str]:
        raw: dict[bytes, bytes] = await self.redis.hgetall(self.keys.request(request_id))
        return {k.decode(): v.decode("latin-1") for k, v in raw.items()}

    async def state(self, request_id: str) -> str:
        return (await self.record(request_id))["state"]

    async def log(self, request_id: str) -> list[Chunk | End]:
        entries = await self.redis.xrange(self.keys.log(request_id))
        return [unpack_event(value) for _, fields in entries for value in fields.values()]

    async def tokens(self, request_id: str) -> list[int]:
        log = await self.log(request_id)
        return [i for event in log if isinstance(event, Chunk) for i in event.token_ids]

    async def end(self, request_id: str) -> End:
        """The one End in a log, which is its last entry."""
        log = await self.log(request_id)
        ends = [event for event in log if isinstance(event, End)]
        assert ends == log[-1:], f"log of {request_id} is {log}"
        return ends[0]

    async def compact(self, *ids: str) -> int:
        """Make these logs compact, or all that are ripe; how many it did."""
        names = ids or await self.logs.list_compactable(after_ms=0, count=1000)
        logs = await self.logs.read(names)
        return await self.logs.compact([(log, compacted(log.chunks)) for log in logs])

    async def counter(self, name: str) -> int:
        return int(await self.redis.hget(self.keys.counters, name) or 0)

    async def now_ms(self) -> int:
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def wait_ms(self, milliseconds: int) -> None:
        """Let time pass on the server's clock."""
        until = await self.now_ms() + milliseconds
        while await self.now_ms() <= until:
            await asyncio.sleep(0.001)

    async def check(
        self, *, ended: bool = False, stale_entries: bool = False, ledger: bool = False
    ) -> None:
        """Every invariant holds; see :func:`violations`."""
        found = await violations(
            self.redis, self.keys, token=token, ended=ended, stale_entries=stale_entries,
            ledger=ledger,
        )  # fmt: skip
        assert not found, "\n".join(found)


@dataclass
class FakeWorker:
    """Claims and publishes; generates :func:`token`. Keeps what it believes to own."""

    shard: Shard
    name: str
    lease_ms: int
    claims: dict[str, Claim] = field(default_factory=dict)

    def claim_call(
        self,
        requests: int = 1,
        *,
        tokens: int = 1 << 40,
        suspect_ok: bool = True,
        least_urgent: Lane = Lane.BATCH,
    ) -> Call:
        return self.shard.ops.claim(
            self.name,
            lease_ms=self.lease_ms,
            requests=requests,
            tokens=tokens,
            suspect_ok=suspect_ok,
            least_urgent=least_urgent,
        )

    async def claim(self, requests: int = 1, **options: Any) -> tuple[Claim, ...]:
        """Claim, and again as long as only this worker's share ended the claiming."""
        claims: tuple[Claim, ...] = ()
        more = True
        while more:
            reply = await self.claim_share(requests - len(claims), **options)
            claims, more = claims + reply.claims, reply.more
            if any(claim.suspect for claim in reply.claims):
                options["suspect_ok"] = False
        return claims

    async def claim_share(self, requests: int = 1, **options: Any) -> ClaimReply:
        """Claim once."""
        reply = await self.shard.call(self.claim_call(requests, **options))
        claimed = self.shard.ops.read_claim(reply)
        self.claims.update({claim.id: claim for claim in claimed.claims})
        return claimed

    async def claim_one(self, **options: Any) -> Claim:
        (claim,) = await self.claim(1, **options)
        return claim

    async def next_claim(self) -> Claim:
        """Wait for a request, and claim it."""

        async def is_there() -> bool:
            return bool(await self.claim(1))

        await wait_until_async(is_there, "a request")
        return list(self.claims.values())[-1]

    def tokens(self, claim: Claim, start: int, count: int) -> Append:
        packed = chunk(claim.id, start, count).pack()
        return Append(claim.id, claim.epoch, start, count, packed)

    def ending(
        self, claim: Claim, start: int, count: int = 0, *, reason: Reason = Reason.LENGTH,
        spent: int = -1, usage: Usage | None = NO_USAGE,
    ) -> Append:  # fmt: skip
        if usage is NO_USAGE:
            usage = Usage(output_tokens=start + count)
        end = End(n=start + count, reason=reason, usage=usage)
        packed = chunk(claim.id, start, count).pack() if count else b""
        return Append(
            claim.id, claim.epoch, start, count, packed, end.pack(), reason.state, reason, spent
        )

    async def send(self, *items: Append) -> list[tuple[int, int]]:
        """Append; (status, n) of each item."""
        reply = await self.shard.call(self.append_call(*items))
        if not reply:
            return [(0, item.start + item.num_tokens) for item in items]
        return list(zip(reply[0::2], reply[1::2], strict=True))

    def append_call(self, *items: Append) -> Call:
        return self.shard.ops.append(self.name, items, lease_ms=self.lease_ms)

    async def send_one(self, item: Append) -> tuple[int, int]:
        (answer,) = await self.send(item)
        return answer


LANES = tuple(Lane)

"""Recounts everything that a storm left in Redis, from the keys themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.shared.errors import ProtocolError
from penstock.shared.keys import Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.states import Lane

from .ledger_recount import check_usage
from .storm_counts import Ended, Findings, Invariant

__all__ = ["recount"]

_ENDED = "ended:"


async def recount(redis: Redis, keys: Keys, findings: Findings, *, exclusive: bool) -> None:
    """Check that nothing waits, is owned or leaks, and that every log is as it was read.

    All requests and workers have ended. Violations go to the findings.

    Args:
        redis: a client without a proxy.
        keys: of the shard.
        findings: knows how every request ended.
        exclusive: the server holds nothing but this storm's keys.
    """
    seen: set[str] = set()
    async for raw in redis.scan_iter(count=1000):
        key = raw.decode(errors="replace")
        if key.startswith(keys.prefix):
            seen.add(key)
        elif exclusive:
            findings.violated(Invariant.NO_LEAKS, key, "is not a key of the shard")
    await _check_lifetimes(redis, keys, sorted(seen), findings)
    await _check_counters(redis, keys, findings)
    await check_usage(redis, keys, findings)
    for key, what in ((keys.deadlines, "waits for its deadline"), (keys.leases, "has a lease")):
        for name in await redis.zrange(key, 0, -1):
            findings.violated(Invariant.COUNTERS, name.decode(), f"still {what}")
    for kind in ("own:", "q:"):
        for key in seen:
            if key.startswith(keys.prefix + kind):
                findings.violated(Invariant.COUNTERS, key, "is left, though nothing waits or runs")
    for request_id, ended in findings.ended.items():
        if keys.log(request_id) in seen:
            await _check_log(redis, keys.log(request_id), request_id, ended, findings)


async def _check_lifetimes(redis: Redis, keys: Keys, names: list[str], findings: Findings) -> None:
    permanent = {
        keys.lanes, keys.virtual_time, keys.sweep, keys.leases, keys.counters, keys.bell,
        keys.dead_letters, keys.fingerprints, keys.model_card,
        keys.ingress_tenants, keys.ingress(),
        *(keys.tenants(lane) for lane in Lane),
    }  # fmt: skip
    for at in range(0, len(names), 500):
        part = names[at : at + 500]
        pipeline = redis.pipeline(transaction=False)
        for name in part:
            pipeline.pttl(name)
        for name, left in zip(part, await pipeline.execute(), strict=True):
            if left == -1 and name not in permanent:
                findings.violated(Invariant.NO_LEAKS, name, "never expires")


async def _check_counters(redis: Redis, keys: Keys, findings: Findings) -> None:
    raw: dict[bytes, bytes] = await redis.hgetall(keys.counters)  # type: ignore[misc]
    counters = {name.decode(): int(value) for name, value in raw.items()}
    for name, value in counters.items():
        if not name.startswith(_ENDED) and (value != 0 or name.startswith("tenant")):
            findings.violated(Invariant.COUNTERS, name, f"is {value}, though nothing waits")
    right = Counter(f"{_ENDED}{ended.end.state.value}" for ended in findings.ended.values())
    for name in right.keys() | {n for n in counters if n.startswith(_ENDED)}:
        if counters.get(name, 0) != right[name]:
            findings.violated(
                Invariant.USAGE_ONCE, name, f"is {counters.get(name, 0)}, recounted {right[name]}"
            )


async def _check_log(
    redis: Redis, key: str, request_id: str, ended: Ended, findings: Findings
) -> None:
    try:
        entries = await redis.xrange(key)
        events = [unpack_event(value) for _, fields in entries for value in fields.values()]
    except (ResponseError, ProtocolError) as error:
        findings.violated(Invariant.READERS_AGREE, request_id, f"its log is broken: {error}")
        return
    problem = _problem(events, ended)
    if problem:
        findings.violated(Invariant.READERS_AGREE, request_id, problem)


def _problem(events: list[Any], ended: Ended) -> str | None:
    """The fault of a log; None if it is right."""
    tokens: list[int] = []
    ends = [event for event in events if isinstance(event, End)]
    for event in events:
        if isinstance(event, Chunk):
            if event.start != len(tokens):
                return f"its log has [{event.start}, {event.stop}) after {len(tokens)} tokens"
            tokens += event.token_ids
    if ends != [ended.end] or events[-1:] != ends:
        return f"its log has the ends {ends}; {ended.end} was read"
    if len(tokens) != ended.end.n or rolling_digest(tokens) != ended.digest:
        return f"its log of {len(tokens)} tokens is not the one that was read"
    return None

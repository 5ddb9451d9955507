"""Recounts a shard from its records and says which invariants do not hold.

What holds after every operation, and what a storm must leave behind: counters equal a
recount, every request is in exactly the places its state says, logs are gapless and end once,
nothing but the documented keys lives for ever.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.asyncio import Redis

from penstock.shared.keys import GROUP, Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, Usage, rolling_digest
from penstock.shared.protocol.states import TERMINAL_STATES
from penstock.shared.scripts.usage_ledger import UsageCounts, read_ledger

TERMINAL = {state.value for state in TERMINAL_STATES}

FOREVER = re.compile(
    "tenants:(critical|normal|batch)|lanes|virtual_time|sweep|leases|counters|bell|dead_letters|"
    "fingerprints|ingress_tenants|ingress(:[A-Za-z0-9_-]+)?"
)
"""Keys without expiry that may be left when no request waits or runs."""

WHILE_ALIVE = ("deadlines", "readers", "queue:", "continued:", "suspects", "owned:")
"""Keys without expiry that are there only as long as requests wait or run."""


@dataclass
class Facts:
    """Everything a shard holds."""

    records: dict[str, dict[str, str]] = field(default_factory=dict)
    logs: dict[str, list[tuple[str, Chunk | End]]] = field(default_factory=dict)
    entries: dict[tuple[str, str], tuple[str, str | None]] = field(default_factory=dict)
    """(queue, entry) to (request, consumer it is pending for)."""
    owned: dict[str, tuple[str, int]] = field(default_factory=dict)
    lived_for_ever: list[str] = field(default_factory=list)


async def read_facts(redis: Redis, keys: Keys, found: list[str]) -> Facts:
    facts = Facts()
    async for raw in redis.scan_iter(match=keys.prefix.replace("{", "\\{") + "*", count=1000):
        key = raw.decode()
        name = key.removeprefix(keys.prefix)
        if await redis.pttl(key) == -1:
            facts.lived_for_ever.append(name)
        if name.startswith("request:"):
            values: dict[bytes, bytes] = await redis.hgetall(key)
            facts.records[name[8:]] = {
                k.decode(): v.decode("latin-1") for k, v in values.items() if k != b"payload"
            }
            facts.records[name[8:]]["has_pay"] = str(b"payload" in values)
        elif name.startswith("log:"):
            facts.logs[name[4:]] = [
                (entry.decode(), unpack_event(value))
                for entry, fields in await redis.xrange(key)
                for value in fields.values()
            ]
        elif name.startswith("owned:"):
            for rid, claim in (await redis.hgetall(key)).items():
                if rid.decode() in facts.owned:
                    found.append(f"{rid!r} has two owners")
                facts.owned[rid.decode()] = (name[6:], int(claim.split()[0]))
        elif name.startswith(("queue:", "continued:", "suspects")):
            await _read_queue(redis, key, name, facts, found)
    return facts


async def _read_queue(redis: Redis, key: str, name: str, facts: Facts, found: list[str]) -> None:
    rows = await redis.xpending_range(key, GROUP, "-", "+", 1_000_000)
    pending = {row["message_id"]: row["consumer"] for row in rows}
    entries = await redis.xrange(key)
    if not entries:
        found.append(f"{name} is a stale entry's queue: empty, not deleted")
    for entry, fields in entries:
        consumer = pending.pop(entry, None)
        reader = None if consumer is None else consumer.decode()
        facts.entries[name, entry.decode()] = (fields[b"id"].decode(), reader)
    found.extend(f"{name}: pending entry {entry!r} is not in the stream" for entry in pending)
    found += [
        f"{name}: consumer {consumer['name']!r} stayed and has nothing pending"
        for consumer in await redis.xinfo_consumers(key, GROUP)
        if not consumer["pending"]
    ]


async def violations(
    redis: Redis,
    keys: Keys,
    *,
    token: Callable[[str, int], int] | None = None,
    ended: bool = False,
    stale_entries: bool = False,
    ledger: bool = False,
) -> list[str]:
    """What does not hold now; empty if all is well.

    Args:
        redis: a client without ``decode_responses``.
        keys: of the shard.
        token: the right output token of a request at an index, where that is known.
        ended: nothing waits or runs any more.
        stale_entries: a script was cut short; entries of no request may be left until a claim
            comes to them.
        ledger: the record of every request that ended today is still there, and none was redriven:
            the usage ledger must be the sum of their ends.
    """
    found: list[str] = []
    facts = await read_facts(redis, keys, found)
    await _check_counters(redis, keys, facts, found)
    await _check_places(redis, keys, facts, found)
    _check_logs(facts, found, token)
    if ledger:
        await _check_usage(redis, keys, facts, found)
    found += [
        f"{name} never expires"
        for name in facts.lived_for_ever
        if not FOREVER.fullmatch(name) and (ended or not name.startswith(WHILE_ALIVE))
    ]
    if ended:
        found += [
            f"{rid} has not ended" for rid, r in facts.records.items() if r["state"] not in TERMINAL
        ]
    return [text for text in found if not (stale_entries and "a stale entry" in text)]


async def _check_counters(redis: Redis, keys: Keys, facts: Facts, found: list[str]) -> None:
    right: Counter[str] = Counter()
    for record in facts.records.values():
        if record["state"] == "queued":
            lane, cost = record["lane"], int(record["cost"])
            right.update({"requests": 1, "tokens": cost, "bytes": int(record["bytes"])})
            right.update({f"requests:{lane}": 1, f"tokens:{lane}": cost})
            tenant = record["tenant"]
            right[f"tenant:{tenant}"] += 1
            right[f"tenant_tokens:{tenant}"] += cost
            right[f"tenant_bytes:{tenant}"] += int(record["bytes"])
    counters = {k.decode(): int(v) for k, v in (await redis.hgetall(keys.counters)).items()}
    found += [
        f"counter {name} is {counters.get(name)}, recounted {right[name]}"
        for name in right.keys() | counters.keys()
        if not name.startswith("ended:") and counters.get(name, 0) != right[name]
    ]
    found += [
        f"counter {n} stays at 0" for n, v in counters.items() if n.startswith("tenant") and not v
    ]


async def _check_places(redis: Redis, keys: Keys, facts: Facts, found: list[str]) -> None:
    deadlines = {
        k.decode(): int(v) for k, v in await redis.zrange(keys.deadlines, 0, -1, withscores=True)
    }
    leases = {k.decode() for k in await redis.zrange(keys.leases, 0, -1)}
    for rid, record in facts.records.items():
        state, at = record["state"], (record["queue"].removeprefix(keys.prefix), record["entry"])
        if state in TERMINAL:
            # A queue made anew may give an entry's name a second time, to another request.
            in_queue = facts.entries.get(at, (None, None))[0] == rid
            if rid in deadlines or rid in facts.owned or in_queue:
                found.append(f"{rid} is {state} and still in a queue, owned, or in deadlines")
            if record["has_pay"] == "True":
                found.append(f"{rid} is {state} and kept its payload")
            continue
        waits = (
            int(record.get("queue_deadline", 1 << 60)) if "claimed_at" not in record else 1 << 60
        )
        if deadlines.pop(rid, None) != min(waits, int(record["deadline"])):
            found.append(f"{rid} is {state} and its deadline is not in deadlines")
        entry = facts.entries.pop(at, None)
        reader = record["worker"] if state == "running" else None
        if entry != (rid, reader):
            found.append(f"{rid} is {state}, its entry in {at[0]} is {entry}, wanted for {reader}")
        if state == "queued":
            await _check_served(redis, keys, rid, record, at[0], found)
            if rid in facts.owned:
                found.append(f"{rid} waits and is owned by {facts.owned[rid]}")
        elif facts.owned.pop(rid, None) != (record["worker"], int(record["epoch"])):
            found.append(f"{rid} runs on {record['worker']} and is not in its owned:")
        elif record["worker"] not in leases:
            found.append(f"{rid} runs on {record['worker']}, which has no lease")
    found += [
        f"deadlines holds {rid}, which does not wait or run"
        for rid in deadlines
        if rid not in facts.records
    ]
    found += [f"{place} holds a stale entry: {what}" for place, what in facts.entries.items()]
    found += [f"{owner} owns {rid}, which does not run" for rid, owner in facts.owned.items()]


async def _check_served(
    redis: Redis, keys: Keys, rid: str, record: dict[str, str], queue: str, found: list[str]
) -> None:
    if queue.startswith((f"continued:{record['lane']}", "suspects")):
        return
    lane = record["lane"]
    if queue != f"queue:{lane}:{record['tenant']}":
        found.append(f"{rid} waits in {queue}, which is not its own")
    if await redis.zscore(f"{keys.prefix}tenants:{lane}", record["tenant"]) is None:
        found.append(f"{rid} waits and its tenant is not served")
    if await redis.zscore(keys.lanes, lane) is None:
        found.append(f"{rid} waits and its lane is not served")


def _check_logs(facts: Facts, found: list[str], token: Callable[[str, int], int] | None) -> None:
    for rid, log in facts.logs.items():
        ids: list[int] = []
        last: End | None = None
        for entry, event in log:
            if last is not None:
                found.append(f"log of {rid}: {entry} comes after the end")
            if isinstance(event, End):
                last = event
                if entry != f"{event.n}-1" or event.n != len(ids):
                    found.append(f"log of {rid}: end {event} at {entry} after {len(ids)} tokens")
                continue
            compact = event.start == 0 and entry == f"{event.stop}-1"
            if event.start != len(ids) or not (compact or entry == f"{event.stop}-0"):
                found.append(f"log of {rid}: {entry} holds [{event.start}, {event.stop})")
            ids.extend(event.token_ids)
            if event.digest != rolling_digest(ids):
                found.append(f"log of {rid}: wrong digest at {entry}")
        if token and ids != [token(rid, i) for i in range(len(ids))]:
            found.append(f"log of {rid}: tokens are not the ones generated")
        record = facts.records.get(rid)
        if record is None:
            if last is None:
                found.append(f"log of {rid} has no record and no end")
        elif record["state"] in TERMINAL:
            if last is None or (last.state, last.reason, last.n) != (
                record["state"], record["reason"], int(record["tokens"]),
            ):  # fmt: skip
                found.append(f"log of {rid} ends with {last}, the record with {record['state']}")
        elif last is not None or int(record["tokens"]) != len(ids):
            found.append(
                f"log of {rid} has {len(ids)} tokens, end {last}; record n={record['tokens']}"
            )
    for rid, record in facts.records.items():
        if rid not in facts.logs and (record["state"] in TERMINAL or int(record["tokens"])):
            found.append(f"{rid} is {record['state']} with n={record['tokens']} and has no log")


Place = tuple[str, str, str]
"""Lane, state and tenant."""


async def today(redis: Redis) -> datetime.date:
    seconds, _ = await redis.time()
    return datetime.date(1970, 1, 1) + datetime.timedelta(int(seconds) // 86_400)


async def read_usage(redis: Redis, keys: Keys) -> dict[Place, UsageCounts]:
    """The usage ledger of today and yesterday, in case midnight has just passed."""
    day = await today(redis)
    found: dict[Place, UsageCounts] = {}
    for row in await read_ledger(redis, keys, [day - datetime.timedelta(1), day]):
        place = row.lane, row.state, row.tenant
        found[place] = found.get(place, UsageCounts()).plus(row.counts)
    return found


async def _check_usage(redis: Redis, keys: Keys, facts: Facts, found: list[str]) -> None:
    right: dict[Place, UsageCounts] = {}
    for record in facts.records.values():
        if record["state"] in TERMINAL:
            end = unpack_event(record["end"].encode("latin-1"))
            assert isinstance(end, End)
            place = record["lane"], record["state"], record["tenant"]
            right[place] = right.get(place, UsageCounts()).plus(used(end))
    # Whose the end of a lost record is, a queue entry may have told, or nothing.
    lost = sum(rid not in facts.records and bool(log) for rid, log in facts.logs.items())
    counted = await read_usage(redis, keys)
    differ = [p for p in right.keys() | counted.keys() if counted.get(p) != right.get(p)]
    surplus = sum(c.requests for c in counted.values()) - sum(c.requests for c in right.values())
    if surplus != lost or (differ and not lost):
        found += [
            f"usage of {place} is {counted.get(place)}, recounted {right.get(place)}, "
            f"and {lost} have no record"
            for place in differ
        ]


def used(end: End) -> UsageCounts:
    """What an end adds to the ledger."""
    usage = end.usage or Usage(output_tokens=end.n)
    values = {name: getattr(usage, name) or 0 for name in UsageCounts._fields[1:]}
    return UsageCounts(1, **values)

"""Recounts the usage ledger from the ends that readers saw."""

from __future__ import annotations

import datetime

from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.protocol.events import End
from penstock.shared.scripts.usage_ledger import UsageCounts, read_ledger

from .storm_counts import Findings, Invariant

__all__ = ["check_usage"]


async def check_usage(redis: Redis, keys: Keys, findings: Findings) -> None:
    """Check that the usage ledger is the sum of the ends. Violations go to the findings.

    Args:
        redis: a client without a proxy.
        keys: of the shard, which held nothing before the storm.
        findings: knows how every request ended.
    """
    right: dict[tuple[str, str, str], UsageCounts] = {}
    for ended in findings.ended.values():
        place = ended.lane, ended.end.state.value, ended.tenant
        right[place] = right.get(place, UsageCounts()).plus(_used(ended.end))
    seconds, _ = await redis.time()
    today = datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()
    counted: dict[tuple[str, str, str], UsageCounts] = {}
    # A storm is shorter than a day, and may have passed midnight.
    for row in await read_ledger(redis, keys, [today - datetime.timedelta(1), today]):
        place = row.lane, row.state, row.tenant
        counted[place] = counted.get(place, UsageCounts()).plus(row.counts)
    for place in right.keys() | counted.keys():
        if counted.get(place) != right.get(place):
            where = "usage of " + " ".join(place)
            seen = f"is {counted.get(place)}, recounted {right.get(place)}"
            findings.violated(Invariant.USAGE_ONCE, where, seen)


def _used(end: End) -> UsageCounts:
    """What an end adds to the usage ledger."""
    if end.usage is None:
        return UsageCounts(requests=1, output_tokens=end.n)
    values = {name: getattr(end.usage, name) or 0 for name in UsageCounts._fields[1:]}
    return UsageCounts(1, **values)

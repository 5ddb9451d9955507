"""What tenants have used: the usage ledgers of one or several shards, read and summed."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, Self

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import require_url
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.usage_ledger import (
    LEDGER_DAYS,
    UsageCounts,
    UsageRow,
    read_ledger,
)
from penstock.shared.settings import Settings

from .shards_found import find_shards

__all__ = [
    "GROUPS",
    "UsageReader",
    "UsageSum",
    "read_days",
    "read_usage",
    "sum_usage",
    "write_usage",
]

GROUPS = ("day", "tenant", "model", "lane", "state")
"""By what usage can be summed."""

_DEFAULT_DAYS = 30
_DAYS_PER_CALL = 31


class UsageSum(NamedTuple):
    """A line of a bill.

    Attributes:
        group: the values of what it was summed by, in that order, as text; a day as YYYY-MM-DD.
        counts: the sums.
    """

    group: tuple[str, ...]
    counts: UsageCounts


class _Writable(Protocol):
    def write(self, text: str, /) -> object: ...


class UsageReader:
    """Reads the usage ledgers of a Redis server; in a cluster, those of one node.

    Args:
        settings: the sections ``redis`` and ``queue``.
        outage_s: as of :class:`Producer`.

    Raises:
        RedisUnavailable: the settings name no server.
    """

    def __init__(self, settings: Settings, *, outage_s: float = 10.0) -> None:
        self._own = Keys(settings.queue.model, settings.queue.shard)
        self._client = RetryingClient(
            require_url(settings.redis),
            socket_timeout_s=settings.redis.socket_timeout_s,
            outage_s=outage_s,
        )

    async def __aenter__(self) -> Self:
        try:
            await self._client.connect(self._own.counters)
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def read(
        self,
        first: datetime.date | None = None,
        last: datetime.date | None = None,
        *,
        tenant: str | None = None,
        model: str | None = None,
    ) -> list[UsageRow]:
        """All rows from the first to the last day, both included.

        Args:
            first: a day of UTC; None: 30 days in all.
            last: a day of UTC; None: today.
            tenant: only its rows.
            model: only its rows.

        Raises:
            InvalidRequest: the last day comes before the first, or there are too many.
            RedisUnavailable: see :class:`Producer`.
        """
        shards = await find_shards(self._client, "usage:*") or [self._own]
        return await read_days(self._client, shards, first, last, tenant=tenant, model=model)


async def read_days(
    client: RetryingClient,
    shards: Iterable[Keys],
    first: datetime.date | None = None,
    last: datetime.date | None = None,
    *,
    tenant: str | None = None,
    model: str | None = None,
) -> list[UsageRow]:
    """The same of these shards alone; for arguments and errors see :meth:`UsageReader.read`."""
    seconds, _ = await client.call(lambda: client.redis.time())
    last = last or datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()
    first = first or _before(last, _DEFAULT_DAYS - 1)
    wanted = [keys for keys in shards if model in (None, keys.model)]
    return await read_usage(client, wanted, first, last, tenant=tenant)


def _before(day: datetime.date, days: int) -> datetime.date:
    """The date ``days`` before ``day``; the calendar's first date where that lies before it."""
    return datetime.date.fromordinal(max(1, day.toordinal() - days))


async def read_usage(
    client: RetryingClient,
    shards: Iterable[Keys],
    first: datetime.date,
    last: datetime.date,
    *,
    tenant: str | None = None,
) -> list[UsageRow]:
    """The rows of these shards' ledgers from the first to the last day, both included.

    Args:
        client: the connection.
        shards: whose ledgers.
        first: a day of UTC.
        last: a day of UTC.
        tenant: only this tenant's rows; None: all.

    Raises:
        InvalidRequest: the last day comes before the first, or there are too many.
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """
    count = (last - first).days + 1
    if not 1 <= count <= LEDGER_DAYS:
        allowed = f"a day from {first} on, at most {LEDGER_DAYS} days in all"
        raise InvalidRequest("to", str(last), allowed)
    days = [first + datetime.timedelta(i) for i in range(count)]
    rows: list[UsageRow] = []
    for keys in shards:
        for at in range(0, count, _DAYS_PER_CALL):
            part = days[at : at + _DAYS_PER_CALL]
            rows += await client.call(partial(read_ledger, client.redis, keys, part))
    return rows if tenant is None else [row for row in rows if row.tenant == tenant]


def sum_usage(rows: Iterable[UsageRow], by: Sequence[str]) -> list[UsageSum]:
    """Sum rows by some of :data:`GROUPS`; in order of the groups.

    Raises:
        InvalidRequest: another name, or one twice.
    """
    if len(set(by)) != len(by) or not set(by) <= set(GROUPS):
        raise InvalidRequest("by", ",".join(by), f"names of {', '.join(GROUPS)}, each once")
    sums: dict[tuple[str, ...], UsageCounts] = {}
    for row in rows:
        group = tuple(str(getattr(row, name)) for name in by)
        sums[group] = sums.get(group, UsageCounts()).plus(row.counts)
    return [UsageSum(group, sums[group]) for group in sorted(sums)]


def write_usage(out: _Writable, by: Sequence[str], sums: Iterable[UsageSum]) -> None:
    """Write sums as CSV, with a line of names first."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*by, *UsageCounts._fields])
    writer.writerows([*line.group, *line.counts] for line in sums)

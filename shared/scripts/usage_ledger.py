"""The usage ledger as the scripts write it: what ended requests have used, by day, lane and tenant.

``lua/lib/usage.lua`` says how it is counted; this module reads it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import NamedTuple

from ..keys import Keys
from ..redis.resp import Exchanger, field_pairs
from .replies import accepted
from .script_loader import Command, Pipelined, run_calls

__all__ = [
    "LEDGER_DAYS",
    "OTHER",
    "UNKNOWN",
    "UsageCounts",
    "UsageRow",
    "day_number",
    "read_ledger",
]

OTHER = "(other)"
"""Tenant for which ends count once a day's ledger is full."""

UNKNOWN = "(unknown)"
"""Lane or tenant of a request whose record was lost, or that was refused before it was read."""

LEDGER_DAYS = 3660
"""Most days that one reading may cover."""

_ROWS = b"rows"
_EPOCH = datetime.date(1970, 1, 1)


class UsageCounts(NamedTuple):
    """Sums over ended requests, in the order of a ledger's row.

    Attributes:
        requests: how many ended.
        prompt_tokens: tokens of their prompts, of those whose worker had told it.
        cached_tokens: of these, reused from a cache and not computed.
        output_tokens: tokens generated.
        drafted_tokens: tokens drafted, accepted or not.
        queue_ms: time from acceptance to the first claim, in ms; 0 for those never claimed.
        device_us: their share of the device's time, in microseconds.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    queue_ms: int = 0
    device_us: int = 0

    def plus(self, other: UsageCounts) -> UsageCounts:
        """The sums of both."""
        return UsageCounts(*map(sum, zip(self, other, strict=True)))


class UsageRow(NamedTuple):
    """The requests of one tenant that ended on one day, in one lane and state.

    Attributes:
        day: of UTC, by Redis' clock at their end.
        model: the served model.
        lane: :data:`UNKNOWN` if it was lost.
        state: their terminal state.
        tenant: its name, :data:`OTHER` or :data:`UNKNOWN`.
        counts: the sums.
    """

    day: datetime.date
    model: str
    lane: str
    state: str
    tenant: str
    counts: UsageCounts


def day_number(day: datetime.date) -> int:
    """A day as its ledger's key names it: days since 1970."""
    return (day - _EPOCH).days


async def read_ledger(
    redis: Pipelined | Exchanger, keys: Keys, days: Iterable[datetime.date]
) -> list[UsageRow]:
    """The ledgers of these days, in one round trip; a row that was damaged by hand is left out.

    Raises:
        RedisUnavailable: the server refuses.
        redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: no answer came.
    """
    wanted = list(days)
    calls = [Command(("HGETALL", keys.usage(day_number(day)))) for day in wanted]
    replies = await run_calls(redis, calls) if calls else []
    rows: list[UsageRow] = []
    for day, reply in zip(wanted, replies, strict=True):
        accepted("HGETALL", reply)
        rows += _rows(day, keys.model, field_pairs(reply))
    return rows


def _rows(
    day: datetime.date, model: str, fields: Iterable[tuple[bytes, bytes]]
) -> Iterable[UsageRow]:
    for name, value in fields:
        place, words = name.decode(errors="replace").split(" ", 2), value.split()
        is_row = len(place) == 3 and len(words) == len(UsageCounts._fields)
        if name != _ROWS and is_row and all(word.isdigit() for word in words):
            lane, state, tenant = place
            yield UsageRow(day, model, lane, state, tenant, UsageCounts(*map(int, words)))

"""``penstock usage``: what tenants have used, summed from the ledger."""

from __future__ import annotations

import asyncio
import datetime
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from penstock.shared.errors import InvalidRequest
from penstock.shared.scripts.usage_ledger import UsageCounts, UsageRow
from penstock.shared.settings import Settings

from ...administration.usage import GROUPS, UsageReader, UsageSum, sum_usage, write_usage
from ..options import ConfigOption, JsonOption, RedisOption, client_settings
from ..output import printable, write_json

__all__ = ["usage"]

_WIDE = 10_000


def usage(
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="DAY", help="First day, YYYY-MM-DD (UTC); default: 30 days."
        ),
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="DAY", help="Last day; default: today.")] = None,
    by: Annotated[
        str,
        typer.Option(metavar="NAMES", help=f"What to sum by, of {','.join(GROUPS)}."),
    ] = "tenant,model",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this model; default: all there are.")
    ] = None,
    csv_: Annotated[bool, typer.Option("--csv", help="Write CSV with a line of names.")] = False,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what tenants have used: requests, tokens, time in the queue and on the device."""
    groups = [name.strip() for name in by.split(",") if name.strip()]
    sum_usage((), groups)
    settings = client_settings(redis, None, None, config)
    first, last = _day("from", from_), _day("to", to)
    rows = asyncio.run(_read(settings, first, last, tenant, model))
    sums = sum_usage(rows, groups)
    if json:
        write_json({"by": groups, "usage": [_facts(groups, line) for line in sums]})
    elif csv_:
        write_usage(sys.stdout, groups, sums)
    elif sums:
        width = None if sys.stdout.isatty() else _WIDE
        Console(width=width).print(_table(groups, sums))
    else:
        typer.echo("no usage")


async def _read(
    settings: Settings,
    first: datetime.date | None,
    last: datetime.date | None,
    tenant: str | None,
    model: str | None,
) -> list[UsageRow]:
    async with UsageReader(settings) as reader:
        return await reader.read(first, last, tenant=tenant, model=model)


def _day(name: str, text: str | None) -> datetime.date | None:
    if text is None:
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(name, text, "a day such as 2026-11-22") from None


def _facts(groups: Sequence[str], line: UsageSum) -> dict[str, object]:
    return {**dict(zip(groups, line.group, strict=True)), **line.counts._asdict()}


def _table(groups: Sequence[str], sums: Sequence[UsageSum]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in groups:
        table.add_column(name)
    for title in ("requests", "prompt", "cached", "output", "drafted", "queued s", "device s"):
        table.add_column(title, justify="right")
    total = UsageCounts()
    for line in sums:
        total = total.plus(line.counts)
        table.add_row(*map(printable, line.group), *_cells(line.counts))
    if groups and len(sums) > 1:
        table.add_section()
        table.add_row("all", *[""] * (len(groups) - 1), *_cells(total))
    return table


def _cells(counts: UsageCounts) -> list[str]:
    return [
        *(str(count) for count in counts[:5]),
        f"{counts.queue_ms / 1000:.1f}",
        f"{counts.device_us / 1e6:.1f}",
    ]

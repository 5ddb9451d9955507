"""``penstock schedule add | list | remove``: batches that start by the clock."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from penstock.shared.protocol.states import Lane

from ..options import ConfigOption, JsonOption, RedisOption, client_settings, command_group
from ..output import write_json
from .batch_options import (
    LaneOption,
    PayerOption,
    WebhookOption,
    WindowOption,
    file_chunks,
    first_line_url,
    read_time,
)
from .session import open_service, when_utc

if TYPE_CHECKING:
    from ...batches.batch_service import BatchService
    from ...batches.schedules import Schedule

__all__ = ["schedule"]

schedule = command_group("Batches that start by the clock; `penstock batches` starts them.")


@schedule.command()
def add(
    cron: Annotated[
        str,
        typer.Argument(help="When, in UTC, as in '0 2 * * *': every night.", show_default=False),
    ],
    file: Annotated[Path, typer.Option("--batch", help="JSONL file in OpenAI's batch format.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the file's name.")
    ] = None,
    lane: LaneOption = Lane.BATCH,
    tenant: PayerOption = "default",
    window: WindowOption = "24h",
    webhook: WebhookOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Start a batch over a file again and again. The file is copied now."""
    settings = client_settings(redis, None, None, config)
    window_s, url = read_time("window", window), first_line_url(file)

    async def run() -> Schedule:
        async with open_service(settings) as service:
            service.check_schedule(
                name or file.stem, cron, endpoint=url, tenant=tenant, window_s=window_s,
                webhook=webhook,
            )  # fmt: skip
            stored = await service.files.upload(
                file_chunks(file), tenant=tenant, filename=file.name, expires_after_s=None
            )
            return await service.schedule(
                name or file.stem,
                cron,
                file_id=stored.id,
                endpoint=url,
                tenant=tenant,
                lane=lane,
                window_s=window_s,
                webhook=webhook,
            )

    made = asyncio.run(run())
    typer.echo(f"{made.name}: next at {when_utc(made.next_at)}")


@schedule.command("list")
def list_schedules(
    json: JsonOption = False, redis: RedisOption = None, config: ConfigOption = None
) -> None:
    """Show the schedules."""
    settings = client_settings(redis, None, None, config)

    async def run() -> list[tuple[Schedule, str]]:
        async with open_service(settings) as service:
            return [(item, await _last(service, item)) for item in await service.schedules.all()]

    found = asyncio.run(run())
    if json:
        write_json({"schedules": [{**item.model_dump(), "last": last} for item, last in found]})
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("schedule", "cron (UTC)", "next", "endpoint", "tenant", "lane", "last firing"):
        table.add_column(column)
    for item, last in found:
        table.add_row(
            item.name, item.cron, when_utc(item.next_at), item.endpoint, item.tenant, item.lane,
            last,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@schedule.command()
def remove(
    name: Annotated[str, typer.Argument(help="The schedule.", show_default=False)],
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Forget a schedule; batches that it started go on."""
    settings = client_settings(redis, None, None, config)

    async def run() -> None:
        async with open_service(settings) as service:
            await service.unschedule(name)

    asyncio.run(run())
    typer.echo(f"removed {name}")


async def _last(service: BatchService, item: Schedule) -> str:
    """What became of a schedule's last firing."""
    from ...batches.stores.batch_store import UnknownBatch

    if not item.last_batch_id:
        return item.error
    try:
        batch = await service.batches.get(item.last_batch_id)
    except UnknownBatch:  # its record has expired
        return item.last_batch_id
    return f"{batch.id} {batch.state.value}"

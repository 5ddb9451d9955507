"""``penstock webhook list | retry``: calls that were given up."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..options import ConfigOption, JsonOption, RedisOption, client_settings, command_group
from ..output import write_json
from .session import open_service, when

if TYPE_CHECKING:
    from ...batches.webhooks.deliveries import Delivery

__all__ = ["webhook"]

webhook = command_group("Webhook calls that were given up; `penstock batches` makes the calls.")


@webhook.command("list")
def list_calls(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most calls to show.")] = 20,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the calls that were given up, latest first."""
    settings = client_settings(redis, None, None, config)

    async def run() -> list[Delivery]:
        async with open_service(settings) as service:
            return await service.deliveries.dead(limit)

    found = asyncio.run(run())
    if json:
        write_json({"webhooks": [item.model_dump() for item in found]})
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("call", "last attempt due", "attempts", "url", "error"):
        table.add_column(column)
    for item in found:
        table.add_row(item.id, when(item.due_at), str(item.attempts), item.url, item.error)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@webhook.command()
def retry(
    id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a call again that was given up, with all its attempts."""
    settings = client_settings(redis, None, None, config)

    async def run() -> None:
        async with open_service(settings) as service:
            await service.deliveries.retry(id)

    asyncio.run(run())
    typer.echo(f"queued {id}")

"""``penstock batch submit | status | list | results | cancel``: files of requests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.states import Lane

from ..options import ConfigOption, JsonOption, RedisOption, client_settings, command_group
from ..output import one_line, write_json, write_note
from .batch_options import (
    LaneOption,
    PayerOption,
    WebhookOption,
    WindowOption,
    file_chunks,
    first_line_url,
    read_time,
)
from .session import batch_facts, open_service, when

if TYPE_CHECKING:
    from ...batches.batch_service import BatchService
    from ...batches.stores.records import Batch

__all__ = ["batch"]

batch = command_group("Files of requests in the background; `penstock batches` drives them.")

IdArgument = Annotated[str, typer.Argument(help="Id of the batch.", show_default=False)]
TenantOption = Annotated[str, typer.Option(metavar="NAME", help="Whose batches.")]

_POLL_S = 0.5


@batch.command()
def submit(
    file: Annotated[
        Path, typer.Argument(help="JSONL file in OpenAI's batch format.", show_default=False)
    ],
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Default: the url of the first line.")
    ] = None,
    lane: LaneOption = Lane.BATCH,
    tenant: PayerOption = "default",
    window: WindowOption = "24h",
    webhook: WebhookOption = None,
    wait: Annotated[bool, typer.Option(help="Show the progress until the batch ends.")] = False,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Start a batch over a file; prints its id. With --wait the exit code is that of status."""
    settings = client_settings(redis, None, None, config)
    window_s = read_time("window", window)
    url = endpoint or first_line_url(file)

    async def run() -> Batch:
        async with open_service(settings) as service:
            stored = await service.files.upload(
                file_chunks(file), tenant=tenant, filename=file.name,
                expires_after_s=settings.batches.file_expiry_s,
            )  # fmt: skip
            started = await service.create(
                input_file_id=stored.id,
                endpoint=url,
                tenant=tenant,
                lane=lane,
                window_s=window_s,
                webhook=webhook,
            )
            if not json:
                typer.echo(started.id)
            return await _watch(service, started, shown=not json) if wait else started

    _finish(asyncio.run(run()), json=json, shown=wait, check=wait)


@batch.command()
def status(
    id: IdArgument,
    watch: Annotated[bool, typer.Option(help="Show the progress until the batch ends.")] = False,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Show how far a batch is. With --watch the exit code is 1 unless it was completed."""
    settings = client_settings(redis, None, None, config)

    async def run() -> Batch:
        async with open_service(settings) as service:
            found = await service.batches.get(id)
            return await _watch(service, found, shown=not json) if watch else found

    _finish(asyncio.run(run()), json=json, shown=True, check=watch)


@batch.command("list")
def list_batches(
    tenant: TenantOption = "default",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most batches to show.")] = 20,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Show a tenant's batches, newest first."""
    settings = client_settings(redis, None, None, config)

    async def run() -> tuple[list[Batch], bool]:
        async with open_service(settings) as service:
            return await service.batches.page(tenant, limit=limit)

    found, more = asyncio.run(run())
    if json:
        write_json({"batches": [batch_facts(item) for item in found], "more": more})
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("batch", "created", "state", "model", "lines", "completed", "failed"):
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    for item in found:
        counts = (str(item.total), str(item.completed), str(item.failed))
        table.add_row(item.id, when(item.created_at), item.state.value, item.model, *counts)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if more:
        write_note("there are more; --limit shows them")


_NUMBERS = frozenset({"lines", "completed", "failed"})


@batch.command()
def results(
    id: IdArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed.")] = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Write the answers of a batch that has ended, one JSON object a line."""
    settings = client_settings(redis, None, None, config)

    async def run() -> None:
        async with open_service(settings) as service:
            found = await service.batches.get(id)
            if not found.ended:
                allowed = f"a batch that has ended; this one is {found.state.value}"
                raise InvalidRequest("id", id, allowed)
            file_id = found.error_file_id if errors else found.output_file_id
            if file_id is None:
                write_note("it has none")
                return
            file = await service.files.get(file_id)
            target = sys.stdout.buffer if output is None else output.open("wb")
            try:
                async for chunk in await service.files.content(file):
                    target.write(chunk)
                target.flush()
            finally:
                if output is not None:
                    target.close()

    asyncio.run(run())


@batch.command()
def cancel(id: IdArgument, redis: RedisOption = None, config: ConfigOption = None) -> None:
    """Stop a batch; what has ended stays readable."""
    settings = client_settings(redis, None, None, config)

    async def run() -> Batch:
        async with open_service(settings) as service:
            return await service.cancel(id, None)

    typer.echo(asyncio.run(run()).state.value)


async def _watch(service: BatchService, found: Batch, *, shown: bool) -> Batch:
    """Follow a batch until it ends; the bar is drawn on a terminal alone."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task, told = bar.add_task(found.state.value, total=None), ""
        while not found.ended:
            await asyncio.sleep(_POLL_S)
            found = await service.batches.get(found.id)
            if found.trouble not in ("", told):
                told = found.trouble
                bar.console.print(_waits(found), style="dim", markup=False, highlight=False)
            bar.update(
                task,
                description=found.state.value,
                total=found.total or None,
                completed=found.completed + found.failed,
            )
    return found


def _waits(found: Batch) -> str:
    return one_line(f"waits since {when(found.trouble_since)}: {found.trouble}")


def _finish(found: Batch, *, json: bool, shown: bool, check: bool = False) -> None:
    if json:
        write_json(batch_facts(found))
    elif shown:
        typer.echo(
            f"{found.state.value}: {found.completed} of {found.total} lines completed, "
            f"{found.failed} failed"
        )
        if found.trouble:
            write_note(_waits(found))
        for error in found.errors:
            where = "the file" if error.line is None else f"line {error.line}"
            write_note(one_line(f"{where}: {error.message}"))
        if found.num_errors > len(found.errors):
            write_note(f"and {found.num_errors - len(found.errors)} more errors")
    if check and found.state.value != "completed":
        raise typer.Exit(1)

"""The command ``penstock plan``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.producer.cli.options import JsonOption
from penstock.producer.cli.output import write_json

if TYPE_CHECKING:
    from penstock.gpu_worker.model.checkpoints.memory_plan import MemoryPlan

__all__ = ["plan"]


def plan(
    model: Annotated[str, typer.Option(help="Directory of the checkpoint, or 'demo'.")] = "demo",
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; default: the model's longest.", min=1),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the device, as in 8GiB; default: what is free."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    json: JsonOption = False,
) -> None:
    """Show what a model needs in memory, by number format; nothing is loaded.

    The exit code is 1 if it fits in none.
    """
    from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
    from penstock.gpu_worker.model.kv.memory_budget import parse_bytes
    from penstock.gpu_worker.model.loading.loader import pick_device

    found = plan_memory(
        model,
        context=context,
        memory_bytes=None if memory is None else parse_bytes(memory),
        device=pick_device(device),
    )
    if json:
        write_json({**dataclasses.asdict(found), "first_fit": found.first_fit})
    else:
        _show(found)
    raise typer.Exit(0 if found.first_fit else 1)


def _show(found: MemoryPlan) -> None:
    from penstock.gpu_worker.model.kv.memory_budget import format_bytes

    console = Console(soft_wrap=True, highlight=False)
    table = Table("format", box=None)
    for title in ("weights", "KV a token", f"sequences of {found.context:,}", "missing"):
        table.add_column(title, justify="right")
    for row in found.formats:
        table.add_row(
            row.name,
            format_bytes(row.weight_bytes),
            format_bytes(row.token_bytes),
            f"{row.sequences:,}",
            format_bytes(row.missing_bytes) if row.missing_bytes else "",
        )
    console.print(table)
    console.print(
        f"{found.parameters:,} parameters, {format_bytes(found.stored_bytes)} stored; "
        f"{format_bytes(found.memory_bytes)} of memory, of which a tenth is kept free"
    )
    fit = found.first_fit
    if fit is None:
        console.print("it fits in none: take a smaller model, a shorter context or more memory")
    elif fit in ("int8", "int4"):
        console.print(
            f"it fits quantised: penstock quantize SRC DST --method {fit} makes a copy, one layer "
            "in memory at a time"
        )

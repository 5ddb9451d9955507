"""The command ``penstock plan``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.producer.cli.options import JsonOption
from penstock.producer.cli.output import write_json
from penstock.shared.errors import ConfigurationError

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
    dtype: Annotated[
        str,
        typer.Option(help="A worker's model.dtype, which counts beside codes; auto as it does."),
    ] = "auto",
    json: JsonOption = False,
) -> None:
    """Show what a model needs in memory, by number format; nothing is loaded.

    The exit code is 1 if it fits in none.
    """
    from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
    from penstock.gpu_worker.model.kv.memory_budget import parse_bytes
    from penstock.gpu_worker.model.loading.loader import DTYPES, pick_device

    if dtype not in ("auto", *DTYPES):
        raise ConfigurationError(f"--dtype: got {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    found = plan_memory(
        model,
        context=context,
        memory_bytes=None if memory is None else parse_bytes(memory),
        device=pick_device(device),
        dtype=dtype,
    )
    if json:
        write_json({**dataclasses.asdict(found), "first_fit": found.first_fit})
    else:
        _show(found)
    raise typer.Exit(0 if found.first_fit else 1)


def _show(found: MemoryPlan) -> None:
    from penstock.gpu_worker.model.kv.memory_budget import format_bytes

    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("format", "dtype", "KV"):
        table.add_column(title, no_wrap=True)
    for title in ("weights", "to load", "KV a token", "sequences", "missing"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.formats:
        table.add_row(
            row.name,
            row.dtype,
            row.dtype if row.kv_cache_dtype == "auto" else row.kv_cache_dtype,
            format_bytes(row.weight_bytes),
            format_bytes(row.load_bytes),
            format_bytes(row.token_bytes),
            f"{row.sequences:,}",
            format_bytes(row.missing_bytes) if row.missing_bytes else "",
        )
    console.print(table)
    console.print(
        f"{found.parameters:,} parameters, {format_bytes(found.stored_bytes)} stored; sequences of "
        f"{found.context:,} tokens; {format_bytes(found.memory_bytes)} of memory, of which a tenth "
        "is kept free"
    )
    fit = found.best_fit
    if fit is None:
        console.print("it fits in none: take a smaller model, a shorter context or more memory")
        return
    in_full = fit.kv_cache_dtype == "auto"
    cache = "" if in_full else f" with model.kv_cache_dtype {fit.kv_cache_dtype}"
    if fit.name in ("int8", "fp8", "int4"):
        console.print(
            f"it fits quantised{cache}: penstock quantize SRC DST --method {fit.name} makes a "
            "copy, one weights file in memory at a time"
        )
    elif cache:
        console.print(f"it fits in {fit.name}{cache}")

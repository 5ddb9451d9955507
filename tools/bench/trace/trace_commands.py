"""The commands ``penstock bench trace`` and ``penstock bench modes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...report_view import show_progress
from ...simulate.report.comparison_plot import require_matplotlib
from ..finish import finish
from .trace_options import ModesOptions, TraceOptions

__all__ = ["modes", "trace"]

_Model = Annotated[
    str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
]
_Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
_Slots = Annotated[int, typer.Option(help="Sequences that run at the same time.")]
_Rounds = Annotated[int, typer.Option(help="Rounds; a figure is the median over them.")]
_Threads = Annotated[
    int | None, typer.Option(help="CPU threads; by default the number that suits the model.")
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object: figures, checks, notes, spread.")
]


def trace(
    file: Annotated[Path, typer.Argument(help="JSON file with prompts, output lengths, arrivals.")],
    model: _Model = "demo",
    dtype: _Dtype = "float32",
    in_process: Annotated[
        bool, typer.Option("--in-process", help="The engine alone, without Redis and worker.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Replay only this many requests.")] = None,
    slots: _Slots = 16,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second; by default all come at once.")
    ] = None,
    rounds: _Rounds = 3,
    threads: _Threads = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for keys and values, such as 1GiB.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """A recorded trace, through Redis and a worker: throughput, TTFT, ITL and latency."""
    options = TraceOptions(
        trace=file,
        model=model,
        dtype=dtype,
        in_process=in_process,
        limit=limit,
        slots=slots,
        rate=rate,
        rounds=rounds,
        threads=threads,
        kv_memory=kv_memory,
    )
    with show_progress() as progress:
        from .trace_replay import bench_trace

        report = bench_trace(options, progress)
    finish(report, as_json)


def modes(
    model: _Model = "demo",
    dtype: _Dtype = "float32",
    requests: Annotated[int, typer.Option(help="Requests, all waiting from the start.")] = 48,
    prefix: Annotated[int, typer.Option(help="Tokens of the prompts' common prefix.")] = 64,
    tokens: Annotated[int, typer.Option(help="Output tokens of the longest request.")] = 128,
    slots: _Slots = 16,
    rounds: _Rounds = 3,
    threads: _Threads = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG here.", show_default=False)] = None,
    as_json: _Json = False,
) -> None:
    """One engine and one load: no batching, static, continuous, chunked, cached, speculative."""
    if plot is not None:
        require_matplotlib()
    options = ModesOptions(
        model=model,
        dtype=dtype,
        requests=requests,
        prefix=prefix,
        tokens=tokens,
        slots=slots,
        rounds=rounds,
        threads=threads,
        plot=plot,
    )
    with show_progress() as progress:
        from .batching_modes import bench_modes

        report = bench_modes(options, progress)
    finish(report, as_json)

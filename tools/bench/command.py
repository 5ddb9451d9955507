"""The command ``penstock bench``. Each part imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from ..report_view import show_progress
from ..simulate.report.comparison_plot import require_matplotlib
from .finish import finish
from .options import (
    ChunkingOptions,
    EngineOptions,
    PreemptionOptions,
    PrefixOptions,
    QueueOptions,
    SchedulerOptions,
    SimulatorOptions,
    SpeculationOptions,
)
from .trace.trace_commands import modes, trace

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine: scheduler, queue and engine, against limits and alternatives.",
)


bench.command("trace")(trace)
bench.command("modes")(modes)


@bench.callback()
def _group() -> None:
    """Make it a group, even with a single command."""


_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object: figures, checks, notes, spread.")
]
_Rounds = Annotated[int, typer.Option(help="Rounds; a figure is the median over them.")]


@bench.command("scheduler")
def scheduler(
    running: Annotated[
        str, typer.Option(help="Numbers of running sequences, with commas.")
    ] = "8,64,256,1024",
    waiting: Annotated[
        str, typer.Option(help="Numbers of waiting requests, with commas.")
    ] = "0,10000,100000",
    rounds: _Rounds = 5,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 60,
    as_json: _Json = False,
) -> None:
    """Host time of one step, without a model: schedule() and collect().

    Needs neither Redis nor torch.
    """
    options = SchedulerOptions(
        running=_counts("--running", running),
        waiting=_counts("--waiting", waiting),
        rounds=rounds,
        steps=steps,
    )
    with show_progress() as progress:
        from .engine.scheduler_time import bench_scheduler

        report = bench_scheduler(options, progress)
    finish(report, as_json)


@bench.command("engine")
def engine(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
    ] = "demo",
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,4,16,32",
    tokens: Annotated[int, typer.Option(help="Output tokens of a sequence, at most.")] = 64,
    rounds: _Rounds = 5,
    requests: Annotated[int, typer.Option(help="Requests of a trace of mixed lengths.")] = 96,
    slots: Annotated[int, typer.Option(help="Sequences at the same time in a trace.")] = 16,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; by default each side has the number that suits it."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """A real model on this CPU: against transformers' generate, and through Redis."""
    options = EngineOptions(
        model=model,
        batches=_counts("--batches", batches),
        tokens=tokens,
        rounds=rounds,
        requests=requests,
        slots=slots,
        threads=threads,
    )
    with show_progress() as progress:
        from .engine.throughput import bench_engine

        report = bench_engine(options, progress)
    finish(report, as_json)


@bench.command("queue")
def queue(
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A server to measure; by default one is started.",
            show_default=False,
        ),
    ] = None,
    rounds: _Rounds = 5,
    steps: Annotated[int, typer.Option(help="Steps of 256 tokens in a round.")] = 250,
    submits: Annotated[int, typer.Option(help="Requests to an idle worker in a round.")] = 200,
    seconds: Annotated[float, typer.Option(help="Time of streaming in a round.")] = 2.0,
    queued: Annotated[int, typer.Option(help="Requests in the long queue.")] = 10_000,
    as_json: _Json = False,
) -> None:
    """The way through Redis, without a model: CPU, round trips, latencies, memory, shares."""
    options = QueueOptions(
        redis=redis, rounds=rounds, steps=steps, submits=submits, seconds=seconds, queued=queued
    )
    with show_progress() as progress:
        from .queue.queue_path import bench_queue

        report = bench_queue(options, progress)
    finish(report, as_json)


@bench.command("chunking")
def chunking(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
    ] = "demo",
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 4000,
    streams: Annotated[int, typer.Option(help="Sequences that decode when it comes.")] = 16,
    target_itl_ms: Annotated[
        float | None,
        typer.Option(
            help="Gap between tokens to steer for; by default 2.5 decode steps.", show_default=False
        ),
    ] = None,
    rounds: _Rounds = 3,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default the number that suits the model.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Write a PNG; needs the extra plot.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """A long prompt among running streams, on this CPU: adaptive chunks against none."""
    options = ChunkingOptions(
        model=model,
        prompt=prompt,
        streams=streams,
        target_itl_ms=target_itl_ms,
        rounds=rounds,
        threads=threads,
        plot=picture,
    )
    if picture is not None:
        require_matplotlib()
    with show_progress() as progress:
        from .engine.token_gaps import bench_chunking

        report = bench_chunking(options, progress)
    finish(report, as_json)


@bench.command("preempt")
def preempt(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
    ] = "demo",
    contexts: Annotated[
        str, typer.Option(help="Tokens of a request, prompt and output, with commas.")
    ] = "64,512",
    requests: Annotated[int, typer.Option(help="Requests that want to run together.")] = 12,
    pool_percent: Annotated[
        int, typer.Option(help="KV memory there is, of what all of them will need.")
    ] = 40,
    rounds: _Rounds = 5,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default the number that suits the model.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Too little KV memory or too few places, on this CPU: swap, recompute and auto."""
    options = PreemptionOptions(
        model=model,
        contexts=_counts("--contexts", contexts),
        requests=requests,
        pool_percent=pool_percent,
        rounds=rounds,
        threads=threads,
    )
    with show_progress() as progress:
        from .engine.preemption_modes import bench_preemption

        report = bench_preemption(options, progress)
    finish(report, as_json)


@bench.command("prefix")
def prefix(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
    ] = "demo",
    requests: Annotated[int, typer.Option(help="Requests that begin in the same way.")] = 64,
    shared: Annotated[int, typer.Option(help="Prompt tokens they have in common.")] = 1000,
    own: Annotated[int, typer.Option(help="Prompt tokens of each behind them.")] = 16,
    tokens: Annotated[int, typer.Option(help="Output tokens of each.")] = 16,
    slots: Annotated[int, typer.Option(help="Requests that run together.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds, each with the cache and without.")] = 3,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default the number that suits the model.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Requests with a common prefix, on this CPU: with the prefix cache and without."""
    options = PrefixOptions(
        model=model,
        requests=requests,
        shared=shared,
        own=own,
        tokens=tokens,
        slots=slots,
        rounds=rounds,
        threads=threads,
    )
    with show_progress() as progress:
        from .engine.prefix_reuse import bench_prefix

        report = bench_prefix(options, progress)
    finish(report, as_json)


@bench.command("spec")
def spec(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
    ] = "demo",
    draft: Annotated[
        str, typer.Option(help="Directory of its draft model; 'auto' for that of the demo model.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
    batches: Annotated[
        str, typer.Option(help="Sequences that run together, with commas.")
    ] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="Output tokens of each in a round.")] = 96,
    length: Annotated[int, typer.Option(help="Drafts where they are not chosen.")] = 4,
    rounds: _Rounds = 7,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default the number that suits the model.")
    ] = None,
    clock: Annotated[
        bool, typer.Option("--clock", help="Time by the clock, and not CPU time of the process.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option(help="Also an edit, and what nobody can guess.", show_default=True)
    ] = True,
    shape: Annotated[
        str | None,
        typer.Option(
            help="7b or small: random weights of that shape instead of a model; synthetic.",
            show_default=False,
        ),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(help="Chance that a draft is right, with --shape.")
    ] = 0.7,
    as_json: _Json = False,
) -> None:
    """Speculation: no drafts, n-gram drafts, a draft model, and the choice of auto."""
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"got {device!r}; allowed: auto, cpu, cuda", param_hint="--device")
    if shape not in (None, "7b", "small"):
        raise typer.BadParameter(f"got {shape!r}; allowed: 7b, small", param_hint="--shape")
    options = SpeculationOptions(
        model=model,
        draft=draft,
        device=cast(Literal["auto", "cpu", "cuda"], device),
        batches=_counts("--batches", batches),
        tokens=tokens,
        length=length,
        rounds=rounds,
        threads=threads,
        cpu_time=not clock,
        tasks=tasks,
        shape=cast(Literal["7b", "small"] | None, shape),
        acceptance=acceptance,
    )
    with show_progress() as progress:
        from .speculation.drafting_gain import bench_speculation

        report = bench_speculation(options, progress)
    finish(report, as_json)


@bench.command("simulator")
def simulator(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, 'demo' or 'synthetic'.")
    ] = "demo",
    synthetic_step_ms: Annotated[
        float, typer.Option(help="What a step of 'synthetic' takes.")
    ] = 20.0,
    loads: Annotated[
        str, typer.Option(help="Percent of what the worker can do, with commas.")
    ] = "40,70,90",
    seconds: Annotated[float, typer.Option(help="How long requests come at each load.")] = 12.0,
    lesson_seconds: Annotated[
        float, typer.Option(help="Time to learn step times in, before and after each.")
    ] = 6.0,
    rounds: Annotated[int, typer.Option(help="Rounds; a figure is the median over them.")] = 1,
    slots: Annotated[int, typer.Option(help="Sequences that run at the same time.")] = 16,
    prompt: Annotated[
        str, typer.Option(help="Lengths of prompts, as for penstock simulate.")
    ] = "lognormal:100:1:max=800",
    output: Annotated[
        str, typer.Option(help="Lengths of outputs, likewise.")
    ] = "lognormal:32:0.7:max=200",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default the number that suits the model.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Directory for the traces as played, and the steps learned from."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    as_json: _Json = False,
) -> None:
    """The simulator against a real worker on the same traces, calibrated by its steps."""
    options = SimulatorOptions(
        model=model,
        synthetic_step_ms=synthetic_step_ms,
        loads=_counts("--loads", loads),
        seconds=seconds,
        lesson_seconds=lesson_seconds,
        rounds=rounds,
        slots=slots,
        prompt=prompt,
        output=output,
        threads=threads,
        keep=keep,
        seed=seed,
    )
    with show_progress() as progress:
        from .simulator.fidelity import bench_simulator

        report = bench_simulator(options, progress)
    finish(report, as_json)


def _counts(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"got {text!r}; allowed: whole numbers with commas between", param_hint=option
        ) from None

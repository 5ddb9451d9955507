"""The command ``penstock bench``. Each part imports what it needs when it runs."""

from __future__ import annotations

import typer

from ..measurement import measurement
from ..report import Progress, Report
from .batches.load_options import BatchesOptions
from .options import (
    BatcherOptions,
    ChunkingOptions,
    EmbedOptions,
    EngineOptions,
    GatewayOptions,
    ModesOptions,
    PreemptionOptions,
    PrefixOptions,
    QueueOptions,
    SchedulerOptions,
    ServeOptions,
    SimulatorOptions,
    TraceOptions,
)
from .speculation.speculation_options import SpeculationOptions

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine: scheduler, queue and engine, against limits and alternatives.",
)


@bench.command("trace")
@measurement()
def _trace(options: TraceOptions, progress: Progress) -> Report:
    """A recorded trace, through Redis and a worker: throughput, TTFT, ITL and latency."""
    from .trace.trace_replay import bench_trace

    return bench_trace(options, progress)


@bench.command("modes")
@measurement()
def _modes(options: ModesOptions, progress: Progress) -> Report:
    """One engine and one load: no batching, static, continuous, chunked, cached, speculative."""
    from .trace.batching_modes import bench_modes

    return bench_modes(options, progress)


@bench.command("serve")
@measurement()
def _serve(options: ServeOptions, progress: Progress) -> Report:
    """Load a running deployment, through Redis or HTTP: throughput, TTFT, TPOT, ITL, goodput."""
    from .serving.serve_load import bench_serve

    return bench_serve(options, progress)


@bench.command("scheduler")
@measurement()
def _scheduler(options: SchedulerOptions, progress: Progress) -> Report:
    """Host time of one step, without a model: schedule() and collect().

    Needs neither Redis nor torch.
    """
    from .engine.scheduler_time import bench_scheduler

    return bench_scheduler(options, progress)


@bench.command("engine")
@measurement()
def _engine(options: EngineOptions, progress: Progress) -> Report:
    """A real model on this CPU: against transformers' generate, and through Redis.

    With --quantization or --checkpoints: its number formats against each other.
    """
    if options.formats:
        from .formats.format_rates import bench_formats

        return bench_formats(options, progress)
    from .engine.throughput import bench_engine

    return bench_engine(options, progress)


@bench.command("queue")
@measurement()
def _queue(options: QueueOptions, progress: Progress) -> Report:
    """The way through Redis, without a model: CPU, round trips, latencies, memory, shares."""
    from .queue.queue_path import bench_queue

    return bench_queue(options, progress)


@bench.command("gateway")
@measurement()
def _gateway(options: GatewayOptions, progress: Progress) -> Report:
    """The gateway, without a model: first tokens, CPU and memory of many streams."""
    from .gateway.gateway_path import bench_gateway

    return bench_gateway(options, progress)


@bench.command("batcher")
@measurement()
def _batcher(options: BatcherOptions, progress: Progress) -> Report:
    """Models that answer at once: no batches, fixed sizes, windows, and the application's own."""
    from .batcher.batcher_modes import bench_batcher

    return bench_batcher(options, progress)


@bench.command("batches")
@measurement()
def _batches(options: BatchesOptions, progress: Progress) -> Report:
    """A batch file by OpenAI's client with chat beside it: first tokens, and tokens a second."""
    from .batches.batch_load import bench_batches

    return bench_batches(options, progress)


@bench.command("embed")
@measurement()
def _embed(options: EmbedOptions, progress: Progress) -> Report:
    """Embeddings a second: 64 clients with a text each, against sentence-transformers' encode."""
    from .engine.embedding_rate import bench_embed

    return bench_embed(options, progress)


@bench.command("chunking")
@measurement()
def _chunking(options: ChunkingOptions, progress: Progress) -> Report:
    """A long prompt among running streams, on this CPU: adaptive chunks against none."""
    from .engine.token_gaps import bench_chunking

    return bench_chunking(options, progress)


@bench.command("preempt")
@measurement()
def _preempt(options: PreemptionOptions, progress: Progress) -> Report:
    """Too little KV memory or too few places, on this CPU: swap, recompute and auto."""
    from .engine.preemption_modes import bench_preemption

    return bench_preemption(options, progress)


@bench.command("prefix")
@measurement()
def _prefix(options: PrefixOptions, progress: Progress) -> Report:
    """Requests with a common prefix, on this CPU: with the prefix cache and without."""
    from .engine.prefix_reuse import bench_prefix

    return bench_prefix(options, progress)


@bench.command("spec")
@measurement()
def _spec(options: SpeculationOptions, progress: Progress) -> Report:
    """Speculation: no drafts, n-gram drafts, a draft model, and the choice of auto."""
    from .speculation.drafting_gain import bench_speculation

    return bench_speculation(options, progress)


@bench.command("simulator")
@measurement()
def _simulator(options: SimulatorOptions, progress: Progress) -> Report:
    """The simulator against a real worker on the same traces, calibrated by its steps."""
    from .simulator.fidelity import bench_simulator

    return bench_simulator(options, progress)

"""The options of each measurement, importable without what the measurement needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from penstock.shared.errors import ConfigurationError

from ..measurement import MeasurementOptions, ModelFlag, PlotFlag, Range, RoundsFlag, ThreadsFlag
from .formats.number_format import METHODS, NumberFormat, number_formats

__all__ = [
    "BatcherOptions",
    "ChunkingOptions",
    "DtypeFlag",
    "EmbedOptions",
    "EngineOptions",
    "GatewayOptions",
    "ModesOptions",
    "PreemptionOptions",
    "PrefixOptions",
    "QueueOptions",
    "SchedulerOptions",
    "ServeOptions",
    "SimulatorOptions",
    "TraceOptions",
]

DtypeFlag = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Option(help="float32, bfloat16, float16 or auto."),
]
_Slots = Annotated[int, Option(help="Sequences that run at the same time."), Range(1)]


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(MeasurementOptions):
    """Options of ``bench scheduler``."""

    running: Annotated[
        Sequence[int], Option(help="Numbers of running sequences, with commas."), Range(1)
    ] = (8, 64, 256, 1024)
    waiting: Annotated[
        Sequence[int], Option(help="Numbers of waiting requests, with commas."), Range(0)
    ] = (0, 10_000, 100_000)
    rounds: RoundsFlag = 5
    steps: Annotated[int, Option(help="Steps in a round."), Range(1)] = 60


@dataclass(frozen=True, kw_only=True)
class EngineOptions(MeasurementOptions):
    """Options of ``bench engine``."""

    model: ModelFlag = "demo"
    batches: Annotated[Sequence[int], Option(help="Batch sizes, with commas."), Range(1)] = (
        1, 4, 16, 32,
    )  # fmt: skip
    tokens: Annotated[int, Option(help="Output tokens of a sequence, at most."), Range(1)] = 64
    rounds: RoundsFlag = 5
    requests: Annotated[int, Option(help="Requests of a trace of mixed lengths."), Range(1)] = 96
    slots: Annotated[int, Option(help="Sequences at the same time in a trace."), Range(1)] = 16
    threads: Annotated[
        int | None,
        Option(help="CPU threads; by default each side has the number that suits it."),
        Range(1),
    ] = None
    quantization: Annotated[
        str | None,
        Option(
            metavar="FORMATS",
            help=f"Compare number formats with bfloat16 instead: of {', '.join(METHODS)}.",
            show_default=False,
        ),
    ] = None
    checkpoints: Annotated[
        str | None,
        Option(
            metavar="PATHS",
            help="Compare quantised copies of the model, too: directories or GGUF files.",
            show_default=False,
        ),
    ] = None
    exactness: Annotated[
        bool,
        Option("--exactness", help="Compare the formats' tokens and perplexity, too."),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.formats and self.exactness:
            raise ConfigurationError("--exactness: it needs --quantization or --checkpoints, too")

    @property
    def formats(self) -> tuple[NumberFormat, ...]:
        """The number formats to compare."""
        return number_formats(self.model, self.quantization, self.checkpoints)


@dataclass(frozen=True, kw_only=True)
class QueueOptions(MeasurementOptions):
    """Options of ``bench queue``."""

    redis: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="A server to measure; by default one is started.",
            show_default=False,
        ),
    ] = None
    rounds: RoundsFlag = 5
    steps: Annotated[int, Option(help="Steps of 256 tokens in a round."), Range(1)] = 250
    submits: Annotated[int, Option(help="Requests to an idle worker in a round."), Range(1)] = 200
    seconds: Annotated[
        float, Option(help="Time of streaming in a round."), Range(0, 600, above=True)
    ] = 2.0
    queued: Annotated[int, Option(help="Requests in the long queue."), Range(1000)] = 10_000


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(MeasurementOptions):
    """Options of ``bench gateway``."""

    rounds: RoundsFlag = 5
    seconds: Annotated[
        float, Option(help="Time of load in a round."), Range(0, 600, above=True)
    ] = 3.0
    streams: Annotated[int, Option(help="Streams that are open at once, at most."), Range(2)] = 5000
    rate: Annotated[float, Option(help="Tokens a second, of all streams."), Range(1)] = 10_000


@dataclass(frozen=True, kw_only=True)
class BatcherOptions(MeasurementOptions):
    """Options of ``bench batcher``."""

    rates: Annotated[Sequence[int], Option(help="Requests per second, with commas."), Range(1)] = (
        20,
        60,
        120,
        300,
    )
    seconds: Annotated[
        float, Option(help="How long requests come at each rate."), Range(0, 600, above=True)
    ] = 4.0
    batch_ms: Annotated[float, Option(help="Time of a batch."), Range(0, 60_000)] = 10.0
    item_ms: Annotated[float, Option(help="Time of each item in it."), Range(0, 60_000)] = 0.5
    rounds: RoundsFlag = 1
    plot: PlotFlag = None


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(MeasurementOptions):
    """Options of ``bench embed``."""

    model: Annotated[
        str,
        Option(help="Checkpoint directory, or `minilm`: its shape with random weights."),
    ] = "minilm"
    clients: Annotated[int, Option(help="Clients that send a text each at a time."), Range(1)] = 64
    texts: Annotated[int, Option(help="Texts in a round."), Range(1)] = 512
    rounds: RoundsFlag = 5
    threads: ThreadsFlag = None


@dataclass(frozen=True, kw_only=True)
class ChunkingOptions(MeasurementOptions):
    """Options of ``bench chunking``."""

    model: ModelFlag = "demo"
    prompt: Annotated[int, Option(help="Tokens of the long prompt."), Range(1)] = 4000
    streams: Annotated[int, Option(help="Sequences that decode when it comes."), Range(1)] = 16
    target_itl_ms: Annotated[
        float | None,
        Option(
            help="Gap between tokens to steer for; by default 2.5 decode steps.", show_default=False
        ),
        Range(0, 60_000, above=True),
    ] = None
    rounds: RoundsFlag = 3
    threads: ThreadsFlag = None
    plot: PlotFlag = None


@dataclass(frozen=True, kw_only=True)
class PreemptionOptions(MeasurementOptions):
    """Options of ``bench preempt``."""

    model: ModelFlag = "demo"
    contexts: Annotated[
        Sequence[int],
        Option(help="Tokens of a request, prompt and output, with commas."),
        Range(16),
    ] = (64, 512)
    requests: Annotated[int, Option(help="Requests that want to run together."), Range(2, 4096)] = (
        12
    )
    pool_percent: Annotated[
        int, Option(help="KV memory there is, of what all of them will need."), Range(1, 100)
    ] = 40
    rounds: RoundsFlag = 5
    threads: ThreadsFlag = None


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(MeasurementOptions):
    """Options of ``bench prefix``."""

    model: ModelFlag = "demo"
    requests: Annotated[int, Option(help="Requests that begin in the same way."), Range(1)] = 64
    shared: Annotated[int, Option(help="Prompt tokens they have in common."), Range(1)] = 1000
    own: Annotated[int, Option(help="Prompt tokens of each behind them."), Range(1)] = 16
    tokens: Annotated[int, Option(help="Output tokens of each."), Range(1)] = 16
    slots: Annotated[int, Option(help="Requests that run together."), Range(1)] = 32
    rounds: Annotated[int, Option(help="Rounds, each with the cache and without."), Range(1)] = 3
    threads: ThreadsFlag = None


@dataclass(frozen=True, kw_only=True)
class TraceOptions(MeasurementOptions):
    """Options of ``bench trace``."""

    trace: Annotated[
        Path, Argument(metavar="FILE", help="JSON file with prompts, output lengths, arrivals.")
    ]
    model: ModelFlag = "demo"
    dtype: DtypeFlag = "float32"
    quantization: Annotated[
        Literal["none", "auto", "int8", "int4", "nf4", "fp8"],
        Option(help="As the setting model.quantization."),
    ] = "auto"
    profile: Annotated[
        str | None, Option(help="As the setting worker.profile; its places instead of --slots.")
    ] = None
    in_process: Annotated[
        bool, Option("--in-process", help="The engine alone, without Redis and worker.")
    ] = False
    limit: Annotated[int | None, Option(help="Replay only this many requests."), Range(1)] = None
    temperature: Annotated[
        float, Option(help="Draw tokens at this temperature; 0: greedy."), Range(0, 100)
    ] = 0.0
    top_p: Annotated[float, Option(help="Top-p of drawn tokens."), Range(0, 1, above=True)] = 1.0
    slots: _Slots = 16
    rate: Annotated[
        float | None,
        Option(help="Requests per second; by default all come at once."),
        Range(0, 1e6, above=True),
    ] = None
    rounds: RoundsFlag = 3
    threads: ThreadsFlag = None
    kv_memory: Annotated[str | None, Option(help="Memory for keys and values, such as 1GiB.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(MeasurementOptions):
    """Options of ``bench serve``; those that it shares with vLLM's are called as there."""

    redis: Annotated[
        str | None, Option(metavar="URL", help="Address of the Redis server; default: REDIS_URL.")
    ] = None
    url: Annotated[
        str | None,
        Option(metavar="URL", help="Load an OpenAI-compatible server instead, such as a gateway."),
    ] = None
    api_key: Annotated[
        str | None, Option(envvar="OPENAI_API_KEY", help="The key for it.", show_envvar=True)
    ] = None
    model: Annotated[str, Option(metavar="NAME", help="Name the model is served under.")] = "demo"
    num_prompts: Annotated[int, Option(help="Requests to send."), Range(1)] = 100
    request_rate: Annotated[
        float | None,
        Option(help="Requests per second; by default all come at once."),
        Range(0, 1e6, above=True),
    ] = None
    burstiness: Annotated[
        float,
        Option(help="1: a Poisson process; less is burstier, more is more even."),
        Range(0, 1e6, above=True),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, Option(help="Requests under way at once, at most; by default all."), Range(1)
    ] = None
    words: Annotated[int, Option(help="Random words of a prompt."), Range(1, 100_000)] = 64
    output_tokens: Annotated[int, Option(help="Output tokens of a request."), Range(1)] = 64
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Take prompts, lengths and arrivals from a trace.")
    ] = None
    goodput: Annotated[
        str | None,
        Option(metavar="GOALS", help="Count requests that meet goals in ms: ttft:200,tpot:50."),
    ] = None
    seed: Annotated[int, Option(help="Of prompts and arrivals.")] = 0
    plot: PlotFlag = None


@dataclass(frozen=True, kw_only=True)
class ModesOptions(MeasurementOptions):
    """Options of ``bench modes``."""

    model: ModelFlag = "demo"
    dtype: DtypeFlag = "float32"
    requests: Annotated[int, Option(help="Requests, all waiting from the start."), Range(1)] = 48
    prefix: Annotated[int, Option(help="Tokens of the prompts' common prefix."), Range(1)] = 64
    tokens: Annotated[
        int, Option(help="Output tokens of the longest request; the shortest has 1/8."), Range(8)
    ] = 128
    slots: _Slots = 16
    rounds: RoundsFlag = 3
    threads: ThreadsFlag = None
    plot: PlotFlag = None


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions(MeasurementOptions):
    """Options of ``bench simulator``."""

    model: Annotated[str, Option(help="Directory of a checkpoint, 'demo' or 'synthetic'.")] = "demo"
    synthetic_step_ms: Annotated[float, Option(help="Duration of a step of 'synthetic'.")] = 20.0
    loads: Annotated[
        Sequence[int],
        Option(help="Percent of the worker's capacity, with commas."),
        Range(1, 200),
    ] = (40, 70, 90)
    seconds: Annotated[
        float, Option(help="Duration of the arrivals at each load."), Range(0, 600, above=True)
    ] = 12.0
    lesson_seconds: Annotated[
        float,
        Option(help="Duration of calibration before and after each load."),
        Range(0, 600, above=True),
    ] = 6.0
    rounds: RoundsFlag = 1
    slots: _Slots = 16
    prompt: Annotated[str, Option(help="Lengths of prompts, as for penstock simulate.")] = (
        "lognormal:100:1:max=800"
    )
    output: Annotated[str, Option(help="Lengths of outputs, in the same form.")] = (
        "lognormal:32:0.7:max=200"
    )
    threads: ThreadsFlag = None
    keep: Annotated[
        Path | None,
        Option(help="Directory for the traces as played, and the steps learned from."),
    ] = None
    seed: Annotated[int, Option(help="Of everything drawn.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.loads)) < len(self.loads):
            raise ConfigurationError(f"--loads: got {list(self.loads)}; allowed: each once")
        if self.keep is not None and not self.keep.is_dir():
            raise ConfigurationError(f"--keep: {self.keep} is no directory; make it first")

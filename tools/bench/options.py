"""The options of each measurement, importable without what the measurement needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.shared.errors import ConfigurationError

__all__ = [
    "ChunkingOptions",
    "EngineOptions",
    "PreemptionOptions",
    "QueueOptions",
    "SchedulerOptions",
    "SimulatorOptions",
    "SpeculationOptions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingOptions:
    """Options of the measurement.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        prompt: tokens of the prompt that arrives while streams decode.
        streams: sequences that decode.
        target_itl_ms: target gap of adaptive chunks; None takes a multiple of a decode step.
        rounds: measurements of each mode.
        threads: CPU threads; None takes the number that suits the model.
        plot: where to write a PNG of the last round; None: nowhere.
    """

    model: str = "demo"
    prompt: int = 4000
    streams: int = 16
    target_itl_ms: float | None = None
    rounds: int = 3
    threads: int | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "streams", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")
        if self.target_itl_ms is not None and not 0 < self.target_itl_ms <= 60_000:
            raise ConfigurationError(
                f"--target-itl-ms: got {self.target_itl_ms}; allowed: above 0, up to 60000"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of the measurement.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        batches: sequences that run together.
        tokens: output tokens of each sequence; in a trace, the longest output.
        rounds: measurements of each kind.
        requests: requests of a trace of mixed lengths.
        slots: sequences that run at the same time in a trace.
        threads: CPU threads of both sides; None gives each the number that suits it.
    """

    model: str = "demo"
    batches: Sequence[int] = (1, 4, 16, 32)
    tokens: int = 64
    rounds: int = 5
    requests: int = 96
    slots: int = 16
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            got = list(self.batches)
            raise ConfigurationError(f"--batches: got {got}; allowed: 1 or more")
        for name in ("tokens", "rounds", "requests", "slots"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionOptions:
    """Options of the measurement.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        contexts: prompt and output tokens of a request, one measurement each.
        requests: number of requests that compete, at least 2.
        pool_percent: KV blocks in the pool, in percent of what all requests will need.
        rounds: measurements of each mode.
        threads: CPU threads; None takes the number that suits the model.
    """

    model: str = "demo"
    contexts: Sequence[int] = (64, 512)
    requests: int = 12
    pool_percent: int = 40
    rounds: int = 5
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 16:
            got = list(self.contexts)
            raise ConfigurationError(f"--contexts: got {got}; allowed: 16 or more")
        for name, low, high in (
            ("requests", 2, 4096), ("pool_percent", 1, 100), ("rounds", 1, 10_000),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                option = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{option}: got {value}; allowed: {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Options of the measurement.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        requests: number of requests with the common prefix.
        shared: tokens of the common prefix.
        own: further prompt tokens of each request.
        tokens: output tokens of each.
        slots: sequences that run together.
        rounds: measurements with the cache and without.
        threads: CPU threads; None takes the number that suits the model.
    """

    model: str = "demo"
    requests: int = 64
    shared: int = 1000
    own: int = 16
    tokens: int = 16
    slots: int = 32
    rounds: int = 3
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "shared", "own", "tokens", "slots", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of the queue measurement.

    Attributes:
        redis: address of a server; None starts one for the measurement.
        rounds: measurements of steps and latencies.
        steps: steps in a round, of 256 tokens each.
        submits: requests submitted to an idle worker in a round.
        seconds: duration of a round's token stream.
        queued: depth of the long queue; it is filled once.
    """

    redis: str | None = None
    rounds: int = 5
    steps: int = 250
    submits: int = 200
    seconds: float = 2.0
    queued: int = 10_000

    def __post_init__(self) -> None:
        for name, low in (("rounds", 1), ("steps", 1), ("submits", 1), ("queued", 1000)):
            if getattr(self, name) < low:
                got = getattr(self, name)
                raise ConfigurationError(f"--{name}: got {got}; allowed: {low} or more")
        if not 0 < self.seconds <= 600:
            raise ConfigurationError(f"--seconds: got {self.seconds}; allowed: above 0, up to 600")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of the measurement.

    Attributes:
        running: numbers of running sequences.
        waiting: numbers of waiting sequences; 0 is the baseline.
        rounds: measurements of each combination.
        steps: steps in each measurement.
    """

    running: Sequence[int] = (8, 64, 256, 1024)
    waiting: Sequence[int] = (0, 10_000, 100_000)
    rounds: int = 5
    steps: int = 60

    def __post_init__(self) -> None:
        for name, low in (("running", 1), ("waiting", 0)):
            values = getattr(self, name)
            if not values or min(values) < low:
                raise ConfigurationError(f"--{name}: got {list(values)}; allowed: {low} or more")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorOptions:
    """Options of the comparison.

    Attributes:
        model: a checkpoint's directory, ``demo`` or ``synthetic``.
        synthetic_step_ms: duration of a step of ``synthetic``.
        loads: in percent of the worker's capacity.
        seconds: duration of the arrivals at each load.
        lesson_seconds: duration of the calibrating requests before and after each load.
        rounds: repetitions of the whole.
        slots: sequences that run at the same time.
        prompt, output: lengths, as ``penstock simulate`` takes them.
        threads: CPU threads; None takes the number that suits the model.
        keep: directory for the last round's traces and calibration steps; None: nowhere.
        seed: of everything drawn.
    """

    model: str = "demo"
    synthetic_step_ms: float = 20.0
    loads: Sequence[int] = (40, 70, 90)
    seconds: float = 12.0
    lesson_seconds: float = 6.0
    rounds: int = 1
    slots: int = 16
    prompt: str = "lognormal:100:1:max=800"
    output: str = "lognormal:32:0.7:max=200"
    threads: int | None = None
    keep: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) < 1 or max(self.loads) > 200:
            got = list(self.loads)
            raise ConfigurationError(f"--loads: got {got}; allowed: percentages from 1 to 200")
        if len(set(self.loads)) < len(self.loads):
            raise ConfigurationError(f"--loads: got {list(self.loads)}; allowed: each once")
        for name in ("rounds", "slots"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")
        for name in ("seconds", "lesson_seconds"):
            value = getattr(self, name)
            if not 0 < value <= 600:
                option = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{option}: got {value}; allowed: above 0, up to 600")
        if self.keep is not None and not self.keep.is_dir():
            raise ConfigurationError(f"--keep: {self.keep} is no directory; make it first")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options of the measurement.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        draft: the draft model's directory; ``auto`` for that of ``demo``.
        device: ``auto``, ``cpu`` or ``cuda``.
        batches: sequences that run together.
        tokens: output tokens of each in a round, and of a request on average.
        length: drafts per step in the modes with a fixed length.
        rounds: measurements of each kind.
        threads: CPU threads; None takes the number that suits the model.
        cpu_time: with one CPU thread, count the process's CPU time instead of wall-clock time.
        tasks: also measure the edit and the unpredictable text.
        shape: ``7b`` or ``small``: random weights of that shape instead of ``model``.
        acceptance: chance that a draft is right, with a shape.
    """

    model: str = "demo"
    draft: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    tokens: int = 96
    length: int = 4
    rounds: int = 7
    threads: int | None = None
    cpu_time: bool = True
    tasks: bool = True
    shape: Literal["7b", "small"] | None = None
    acceptance: float = 0.7

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            got = list(self.batches)
            raise ConfigurationError(f"--batches: got {got}; allowed: 1 or more")
        for name in ("tokens", "length", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")
        if not 0 <= self.acceptance <= 1:
            raise ConfigurationError(f"--acceptance: got {self.acceptance}; allowed: 0 to 1")
        if self.device != "cpu" and self.cpu_time:
            raise ConfigurationError(
                f"--device {self.device}: a GPU's time is not the process's; add --clock"
            )

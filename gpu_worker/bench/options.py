"""What can be chosen for a measurement; told without importing what it needs."""

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
    "SpeculationOptions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingOptions:
    """What to measure.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        prompt: tokens of the prompt that comes while streams decode.
        streams: sequences that decode.
        target_itl_ms: gap that adaptive chunks steer for; None takes a multiple of a decode step.
        rounds: measurements of each way.
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
    """What to measure.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        batches: sequences that run together.
        tokens: output tokens of each sequence; of a trace, the most that one has.
        rounds: measurements of each kind.
        requests: requests of a trace of mixed lengths.
        slots: sequences that run at the same time in a trace.
        threads: CPU threads of both sides; None lets each have the number that suits it.
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
    """What to measure.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        contexts: prompt and output tokens of a request, one measurement each.
        requests: that want to run at the same time, at least 2.
        pool_percent: KV blocks there are, of what all of them will need.
        rounds: measurements of each way.
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
    """What to measure.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        requests: how many begin in the same way.
        shared: prompt tokens that they have in common.
        own: prompt tokens of each behind them.
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
    """What to measure and where.

    Attributes:
        redis: address of a server; None starts one for the time of the measurement.
        rounds: measurements of steps and latencies.
        steps: steps in a round, of 256 tokens each.
        submits: requests submitted to an idle worker in a round.
        seconds: how long tokens are streamed in a round.
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
    """What to measure.

    Attributes:
        running: numbers of running sequences.
        waiting: numbers of waiting ones; 0 is what the others are compared with.
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
class SpeculationOptions:
    """What to measure.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        draft: the draft model's directory; ``auto`` for that of ``demo``.
        device: ``auto``, ``cpu`` or ``cuda``.
        batches: sequences that run together.
        tokens: output tokens of each.
        length: drafts of the modes that do not choose them.
        rounds: measurements of each kind.
        threads: CPU threads; None takes the number that suits the model.
        cpu_time: count CPU time of the process, not the clock's.
    """

    model: str = "demo"
    draft: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    tokens: int = 128
    length: int = 4
    rounds: int = 5
    threads: int | None = None
    cpu_time: bool = True

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            got = list(self.batches)
            raise ConfigurationError(f"--batches: got {got}; allowed: 1 or more")
        for name in ("tokens", "length", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name}: got {getattr(self, name)}; allowed: 1 or more")

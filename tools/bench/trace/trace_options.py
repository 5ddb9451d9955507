"""Options of ``penstock bench trace`` and ``penstock bench modes``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.shared.errors import ConfigurationError

__all__ = ["ModesOptions", "TraceOptions"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of a replay.

    Attributes:
        trace: file with the requests.
        model: a checkpoint's directory, or ``demo``.
        dtype: of the weights; one of :data:`DTYPES`.
        in_process: measure the engine alone, without Redis and worker process.
        limit: requests of the trace to replay; None for all.
        slots: sequences that run at the same time.
        rate: requests per second; None for all at once.
        rounds: counted replays.
        threads: CPU threads; None takes the number that suits the model.
        kv_memory: memory for keys and values, as ``engine.kv_memory``; None for its default.
    """

    trace: Path
    model: str = "demo"
    dtype: str = "float32"
    in_process: bool = False
    limit: int | None = None
    slots: int = 16
    rate: float | None = None
    rounds: int = 3
    threads: int | None = None
    kv_memory: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, "limit", "slots", "rounds", "threads")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise ConfigurationError(f"--rate: got {self.rate}; allowed: above 0, up to 1e6")
        _check_dtype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesOptions:
    """Options of the comparison of batching modes.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        dtype: of the weights; one of :data:`DTYPES`.
        requests: number of requests, all waiting from the start.
        prefix: tokens of the prompts' common prefix.
        tokens: output tokens of the longest request; the shortest has an eighth.
        slots: sequences that run at the same time.
        rounds: measurements of each mode.
        threads: CPU threads; None takes the number that suits the model.
        plot: file of a PNG; None for none.
    """

    model: str = "demo"
    dtype: str = "float32"
    requests: int = 48
    prefix: int = 64
    tokens: int = 128
    slots: int = 16
    rounds: int = 3
    threads: int | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        _at_least(self, "requests", "prefix", "slots", "rounds", "threads")
        if self.tokens < 8:
            raise ConfigurationError(f"--tokens: got {self.tokens}; allowed: 8 or more")
        _check_dtype(self.dtype)


def _at_least(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name}: got {value}; allowed: 1 or more")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype: got {dtype!r}; allowed: {', '.join(DTYPES)}")

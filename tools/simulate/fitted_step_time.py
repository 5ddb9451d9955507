"""Step times as a sum of costs, fitted to a worker's log of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from penstock.gpu_worker.engine.scheduling.step_features import StepFeatures
from penstock.shared.errors import ConfigurationError

from .step_time import Roofline

__all__ = ["FittedCost", "MeasuredStep", "fit_costs", "read_steps"]

_LEAST_STEPS = 50
_ROUNDS = 20_000
_ENOUGH = 1e-10


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a real worker: its content, and the seconds of the loop's turn."""

    work: StepFeatures
    seconds: float


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Seconds of a step as a sum over its content.

    Attributes:
        device: supplies what the log does not tell: KV pool, link and context.
        step_s: of any step.
        token_s: of a query token.
        sequence_s: of a sequence.
        chunk_s: additional cost of a sequence with more than one token to compute.
        context_s: of each token whose keys and values are read.
        pair_s: of a query-key pair.
    """

    device: Roofline
    step_s: float
    token_s: float
    sequence_s: float
    chunk_s: float
    context_s: float
    pair_s: float

    def scaled(self, factor: float) -> FittedCost:
        """Return the costs of a machine that takes ``factor`` times as long for everything."""
        names = (field.name for field in fields(self) if field.name != "device")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    @property
    def context(self) -> int:
        """The device's."""
        return self.device.context

    def seconds(self, work: StepFeatures) -> float:
        """The sum."""
        return (
            self.step_s
            + self.token_s * work.tokens
            + self.sequence_s * work.sequences
            + self.chunk_s * work.chunks
            + self.context_s * work.context
            + self.pair_s * work.pairs
        )

    def swap_seconds(self, tokens: int) -> float:
        """The device's."""
        return self.device.swap_seconds(tokens)

    def kv_blocks(self, block_size: int) -> int:
        """The device's."""
        return self.device.kv_blocks(block_size)


def fit_costs(steps: Sequence[MeasuredStep], device: Roofline) -> FittedCost:
    """Fit non-negative costs to the times of steps.

    Least squares, weighted by one over the time: the variance of a step is assumed to grow with its
    time. With these weights the fitted times sum to the measured total.

    Args:
        steps: of a run with all relevant sizes of batches and chunks.
        device: see :class:`FittedCost`.

    Raises:
        ConfigurationError: too few steps without swaps, or steps with drafts, which the simulator
            does not model.
    """
    if any(step.work.drafts for step in steps):
        raise ConfigurationError(
            "the steps hold drafts, and simulated workers make none: log steps of a worker with "
            "speculation.source 'off'"
        )
    plain = [step for step in steps if not step.work.swapped_blocks]
    if len(plain) < _LEAST_STEPS:
        raise ConfigurationError(
            f"there are {len(plain)} steps without swaps; needed: {_LEAST_STEPS} or more, with "
            "all sizes of batches and chunks that are to be simulated"
        )
    rows = [(_amounts(step.work), step.seconds) for step in plain]
    first = _least_squares(rows, [1 / seconds for _, seconds in rows])
    fitted = [sum(map(float.__mul__, first, amounts)) for amounts, _ in rows]
    return FittedCost(device, *_least_squares(rows, [1 / seconds for seconds in fitted]))


def _amounts(work: StepFeatures) -> tuple[float, ...]:
    numbers = work.tokens, work.sequences, work.chunks, work.context, work.pairs
    return (1.0, *map(float, numbers))


def _least_squares(
    rows: Sequence[tuple[tuple[float, ...], float]], weights: Sequence[float]
) -> list[float]:
    """Non-negative least squares by coordinate descent on scaled normal equations."""
    indices = range(len(rows[0][0]))
    scale = [
        math.sqrt(sum(w * amounts[i] ** 2 for (amounts, _), w in zip(rows, weights, strict=True)))
        or 1.0
        for i in indices
    ]
    gram = [[0.0] * len(indices) for _ in indices]
    goal = [0.0] * len(indices)
    for (amounts, seconds), weight in zip(rows, weights, strict=True):
        scaled = [amounts[i] / scale[i] for i in indices]
        for i in indices:
            goal[i] += weight * scaled[i] * seconds
            for j in indices:
                gram[i][j] += weight * scaled[i] * scaled[j]
    costs = [0.0] * len(indices)
    for _ in range(_ROUNDS):
        moved = 0.0
        for i in indices:
            others = sum(gram[i][j] * costs[j] for j in indices if j != i)
            cost = max(0.0, (goal[i] - others) / gram[i][i]) if gram[i][i] else 0.0
            moved = max(moved, abs(cost - costs[i]))
            costs[i] = cost
        if moved <= _ENOUGH * max(costs):
            break
    return [cost / scale[i] for i, cost in enumerate(costs)]


_FIELDS = {field.name for field in fields(StepFeatures)} | {"seconds"}


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read the steps of a worker's log (``worker.step_log``).

    Raises:
        ConfigurationError: the file cannot be read, or a line is not a step (with its number).
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return list(parse_steps(lines, str(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"log of steps {path} cannot be read: {error}") from error


def parse_steps(lines: Iterable[str], name: str) -> Iterator[MeasuredStep]:
    """Parse one step per line; messages call the file ``name``."""
    for number, line in enumerate(lines, start=1):
        where = f"{name}:{number}"
        try:
            values: Any = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict) or values.keys() != _FIELDS:
            raise ConfigurationError(
                f"{where}: not a step; it must be an object with {', '.join(sorted(_FIELDS))}, "
                "as a worker with worker.step_log writes it"
            )
        for key, value in values.items():
            least = 1 if key in ("tokens", "sequences") else 0
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise ConfigurationError(
                    f"{where}: {key} is {value!r}; allowed: numbers from {least} on"
                )
        seconds = values.pop("seconds")
        if seconds > 0:
            yield MeasuredStep(StepFeatures(**values), float(seconds))

"""What decode steps cost with and without drafts: timed at start, corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Calibration", "StepCosts", "StepTiming"]

_SMOOTHING = 0.05
"""Weight of one step in a correction: it follows load and context within some twenty steps."""

_FORGETTING = 0.002
"""How fast a cell that is not visited returns to what the others say, per step."""

_OUTLIER = 2.0
"""A step this many times slower than expected was held up by something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Times of decode steps, in seconds.

    Attributes:
        sequences: numbers of sequences that were timed, ascending.
        drafts: numbers of drafts for each of them, ascending from 0.
        verify: ``verify[i][j]``: the target's step of ``sequences[i]`` with ``drafts[j]`` each.
        draft: ``draft[i]``: one round of the draft model for ``sequences[i]``; None without one.
    """

    sequences: tuple[int, ...]
    drafts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...] | None = None


FREE = Calibration(sequences=(1,), drafts=(0, 1), verify=((1.0, 1.0),), draft=(0.0,))
"""Drafts that cost nothing: for an engine that was given no times."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long a step took.

    Attributes:
        seconds: all of it.
        draft_seconds: of those, what the draft model took.
    """

    seconds: float
    draft_seconds: float = 0.0


class StepCosts:
    """Predicts the seconds of a step; what was measured at start is scaled by what is measured now.

    Each combination that was timed has a factor of its own, because load, context length and the
    caches of a processor do not act on all of them alike.

    Args:
        calibration: the times at start.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._times = calibration
        self._factors = [[1.0] * len(calibration.drafts) for _ in calibration.sequences]
        self._factor = 1.0
        self._draft_factor = 1.0

    def verify(self, num_sequences: int, drafts_each: float) -> float:
        """Seconds of the target's step, with so many drafts for each sequence on average."""
        times, factors = self._times.verify, self._factors
        row, weight = _place(self._times.sequences, num_sequences)
        column, share = _place(self._times.drafts, drafts_each)
        total = 0.0
        for i, w in ((row, 1 - weight), (row + 1, weight)):
            for j, s in ((column, 1 - share), (column + 1, share)):
                if w and s:
                    total += w * s * times[i][j] * factors[i][j]
        return max(total, 1e-9)

    def token(self, num_sequences: int) -> float:
        """Seconds that one more query token costs in a large step."""
        most = self._times.drafts[-1]
        added = self.verify(num_sequences, most) - self.verify(num_sequences, 0)
        return max(added, 0.0) / (most * num_sequences)

    def draft(self, num_sequences: int, rounds: int) -> float:
        """Seconds in which the draft model proposes ``rounds`` tokens for each."""
        times = self._times.draft
        if times is None or not rounds or not num_sequences:
            return 0.0
        row, weight = _place(self._times.sequences, num_sequences)
        above = weight * times[row + 1] if weight else 0.0
        return rounds * self._draft_factor * ((1 - weight) * times[row] + above)

    def observe_verify(self, num_sequences: int, drafts_each: float, seconds: float) -> None:
        """A decode step without prompts has taken so long, drafting not counted."""
        expected = self.verify(num_sequences, drafts_each)
        ratio = min(seconds / expected, _OUTLIER)
        row = _nearest(self._times.sequences, num_sequences)
        column = _nearest(self._times.drafts, drafts_each)
        factors = self._factors
        for line in factors:
            for j, factor in enumerate(line):
                line[j] = factor + _FORGETTING * (self._factor - factor)
        before = factors[row][column]
        factors[row][column] = before * (1 + _SMOOTHING * (ratio - 1))
        self._factor += _SMOOTHING * (factors[row][column] - self._factor)

    def observe_draft(self, num_sequences: int, rounds: int, seconds: float) -> None:
        """The draft model has taken so long."""
        expected = self.draft(num_sequences, rounds)
        if expected > 0:
            ratio = min(seconds / expected, _OUTLIER)
            self._draft_factor *= 1 + _SMOOTHING * (ratio - 1)


def _place(points: Sequence[int], value: float) -> tuple[int, float]:
    """Between which two points a value lies: the index of the lower one, the weight of the upper.

    Beyond the last two the line through them goes on; before the first it does not.
    """
    if len(points) == 1 or value <= points[0]:
        return 0, 0.0
    index = min(bisect_left(points, value), len(points) - 1) - 1
    low, high = points[index], points[index + 1]
    return index, (value - low) / (high - low)


def _nearest(points: Sequence[int], value: float) -> int:
    return min(range(len(points)), key=lambda index: abs(points[index] - value))

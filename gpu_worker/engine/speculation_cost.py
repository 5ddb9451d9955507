"""What decode steps cost with and without drafts: timed at start, corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Calibration", "StepCosts", "StepTiming"]

_SMOOTHING = 0.05
"""Weight of one step in a correction: it follows load and context within some twenty steps."""

_RARE = 0.25
"""Largest weight of one step."""

_FORGETTING = 0.001
"""How fast a factor that is not looked at follows the others, per step."""

_OUTLIER = 2.0
"""A step this many times slower than expected was held up by something else."""

_FAR = 4.0
"""The same of what drafts add, which is a difference and so less certain."""


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

    For each number of sequences that was timed there are two factors: of the step without drafts,
    and of what drafts add to it. Load, context length and the caches of a processor act on them
    differently; the shape in between is that of the start.

    Args:
        calibration: the times at start.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._times = calibration
        self._plain = [1.0] * len(calibration.sequences)
        self._added = [1.0] * len(calibration.sequences)
        self._draft_factor = 1.0
        self._since_plain = 0

    def verify(self, num_sequences: int, drafts_each: float) -> float:
        """Seconds of the target's step, with so many drafts for each sequence on average."""
        row, weight = _place(self._times.sequences, num_sequences)
        column, share = _place(self._times.drafts, drafts_each)
        total = 0.0
        for i, w in ((row, 1 - weight), (row + 1, weight)):
            if not w:
                continue
            times = self._times.verify[i]
            with_drafts = times[column]
            if share:
                with_drafts += share * (times[column + 1] - with_drafts)
            added = self._added[i] * (with_drafts - times[0])
            total += w * (self._plain[i] * times[0] + added)
        return max(total, 1e-9)

    def timed(self, num_sequences: int) -> float:
        """Seconds that a step without drafts took at start."""
        row, weight = _place(self._times.sequences, num_sequences)
        above = weight * self._times.verify[row + 1][0] if weight else 0.0
        return max((1 - weight) * self._times.verify[row][0] + above, 1e-9)

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

    def worth_of_drafting(self, num_sequences: int, length: int = 4) -> float:
        """Share of a step's time that is left if the draft model proposes for all sequences."""
        verify = self.verify(num_sequences, length)
        return verify / (verify + self.draft(num_sequences, length))

    def observe_verify(self, num_sequences: int, drafts_each: float, seconds: float) -> None:
        """A decode step without prompts has taken so long, drafting not counted."""
        row, plain = _nearest(self._times.sequences, num_sequences), self.verify(num_sequences, 0)
        if drafts_each == 0:
            ratio = min(seconds / plain, _OUTLIER)
            # While steps have drafts those without are rare, and each must count for more.
            weight = min(_SMOOTHING * max(1.0, self._since_plain / 4), _RARE)
            self._plain[row] *= 1 + weight * (ratio - 1)
            self._since_plain = 0
        else:
            added = self.verify(num_sequences, drafts_each) - plain
            if added > 0.01 * plain:
                ratio = min(max((seconds - plain) / added, 1 / _FAR), _FAR)
                factor = self._added[row] * (1 + _SMOOTHING * (ratio - 1))
                self._added[row] = min(max(factor, 1 / _FAR), _FAR)
            self._since_plain += 1
        for factors in (self._plain, self._added):
            self._forget(factors, row)

    def _forget(self, factors: list[float], row: int) -> None:
        """What was learned long ago of other numbers of sequences goes the way of this one's."""
        now = factors[row]
        for i, factor in enumerate(factors):
            factors[i] = factor + _FORGETTING * (now - factor)

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

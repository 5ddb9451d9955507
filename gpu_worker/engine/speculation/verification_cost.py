"""What decode steps cost with and without drafts: timed at start, corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..scheduling.cost_fit import CostFit

__all__ = ["Calibration", "StepCosts", "StepTiming"]

_SMOOTHING = 0.05
"""Weight of one step of the draft model in what it is taken to cost."""

_OUTLIER = 2.0
"""One this many times slower than expected was held up by something else."""

_SPREAD = (0.1, 0.2, 0.5)
"""How far off the three factors of a number of sequences may be: without drafts, that there are
any, and how many."""

_SLOPE_SPREAD = 0.03
"""How far off what one draft adds may be, at least, as a share of a step without: at start it may
have been lost in noise."""

_SPEED = 0.5
"""How far off the first and the last may be together: the machine may have been slower at start."""

_LEAST_SLOPE = 0.01
"""What each draft is taken to add, as a share of a step without, where less was measured; the
factor of that is then below 1, and may rise."""

_NOISE = 0.05
"""Of a step, as a share of its time."""


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
    """Predicts the seconds of a step: those measured at start, as corrected by every step.

    For each number of sequences that was timed three factors are followed (:class:`CostFit`): of
    the step without drafts, of what each draft adds, and of what it adds that there are any. The
    last was not seen at start, when all sequences had equally many: sequences of different lengths
    in one step cost attention more calls, however few the drafts. Were that taken for the price of
    a draft, few would be chosen, which is the worst of all lengths. If steps without drafts turn
    out to be faster than at start, the machine was slower then: drafts are taken to have become
    cheaper by as much, those of a draft model, too.

    Args:
        calibration: the times at start. Whatever disturbs a measurement makes it longer: a step
            that took longer than its neighbours let expect was measured badly.
    """

    def __init__(self, calibration: Calibration) -> None:
        verify = tuple(_smooth(calibration.drafts, times) for times in calibration.verify)
        self._times = replace(calibration, verify=verify)
        self._fits = [_fit(calibration.drafts, times) for times in verify]
        self._more = [_more(calibration.drafts, times) for times in verify]
        self._draft_factor = 1.0

    def verify(self, num_sequences: int, drafts_each: float) -> float:
        """Seconds of the target's step, with so many drafts for each sequence on average."""
        row, weight = _place(self._times.sequences, num_sequences)
        total = (1 - weight) * self._of_row(row, drafts_each)
        if weight:
            total += weight * self._of_row(row + 1, drafts_each)
        return max(total, 1e-9)

    def _of_row(self, row: int, drafts_each: float) -> float:
        plain, some, more = self._amounts(row, drafts_each)
        costs = self._fits[row].costs
        return costs[0] * plain + costs[1] * some + costs[2] * more

    def _amounts(self, row: int, drafts_each: float) -> tuple[float, float, float]:
        times = self._times.verify[row]
        if drafts_each <= 0:
            return times[0], 0.0, 0.0
        column, share = _place(self._times.drafts, drafts_each)
        more = self._more[row]
        added = more[column]
        if share:
            added += share * (more[column + 1] - added)
        return times[0], times[0], added

    def timed(self, num_sequences: int) -> float:
        """Seconds that a step without drafts took at start."""
        row, weight = _place(self._times.sequences, num_sequences)
        above = weight * self._times.verify[row + 1][0] if weight else 0.0
        return max((1 - weight) * self._times.verify[row][0] + above, 1e-9)

    def token(self, num_sequences: int) -> float:
        """Seconds that one more query token costs in a large step."""
        least, most = self._times.drafts[1], self._times.drafts[-1]
        added = self.verify(num_sequences, most + 1) - self.verify(num_sequences, least)
        return max(added, 0.0) / ((most + 1 - least) * num_sequences)

    def draft(self, num_sequences: int, rounds: int) -> float:
        """Seconds in which the draft model proposes ``rounds`` tokens for each."""
        times = self._times.draft
        if times is None or not rounds or not num_sequences:
            return 0.0
        row, weight = _place(self._times.sequences, num_sequences)
        above = weight * times[row + 1] if weight else 0.0
        speed = self._fits[_nearest(self._times.sequences, num_sequences)].costs[0]
        factor = rounds * self._draft_factor * max(speed, _NOISE)
        return factor * ((1 - weight) * times[row] + above)

    def worth_of_drafting(self, num_sequences: int, length: int = 4) -> float:
        """Share of a step's time that is left if the draft model proposes for all sequences."""
        verify = self.verify(num_sequences, length)
        return verify / (verify + self.draft(num_sequences, length))

    def observe_verify(self, num_sequences: int, drafts_each: float, seconds: float) -> None:
        """A decode step without prompts has taken so long, drafting not counted."""
        row = _nearest(self._times.sequences, num_sequences)
        # As if it had been of the very number that was timed.
        scale = self.timed(num_sequences) / self._times.verify[row][0]
        self._fits[row].learn(self._amounts(row, drafts_each), seconds / scale)

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


def _smooth(drafts: Sequence[int], times: Sequence[float]) -> tuple[float, ...]:
    """The times, none above one with more drafts or the line between two others."""
    least = times[-1]
    result = [least := min(least, seconds) for seconds in reversed(times)][::-1]
    for index in range(1, len(result) - 1):
        lines = (
            before + (after - before) * (drafts[index] - drafts[i]) / (drafts[j] - drafts[i])
            for i, before in enumerate(result[:index])
            for j, after in enumerate(result[index + 1 :], index + 1)
        )
        result[index] = min(result[index], *lines)
    return tuple(result)


def _more(drafts: Sequence[int], times: Sequence[float]) -> tuple[float, ...]:
    """What numbers of drafts add, up to a factor, and never nothing.

    What they add is followed as so many times this: of nothing nothing could be learned.
    """
    return tuple(
        max(seconds - times[0], _LEAST_SLOPE * times[0] * count)
        for count, seconds in zip(drafts, times, strict=True)
    )


def _fit(drafts: Sequence[int], times: Sequence[float]) -> CostFit:
    """Factors that begin at what times at start say: 1, 0 and, of what drafts add, 1 or less."""
    added = _more(drafts, times)[-1]
    fit = CostFit((times[0], times[0], max(added, _NOISE * times[0])))
    factor = (times[-1] - times[0]) / added if added else 0.0
    slope = _SLOPE_SPREAD * times[0] * drafts[-1] / added if added else 0.0
    spread = (*_SPREAD[:2], max(_SPREAD[2], slope))
    fit.assume((1.0, 0.0, factor), spread, _SPEED, _NOISE * times[0])
    return fit


def _nearest(points: Sequence[int], value: float) -> int:
    return min(range(len(points)), key=lambda index: abs(points[index] - value))

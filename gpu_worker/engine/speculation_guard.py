"""Lets a worker draft only where drafts are measured to pay, whatever costs and rates promise.

What a length promises rests on fits: of costs, of acceptance. A fit may be wrong, on a busy machine
or for a workload that changes; then drafting would be slower than not drafting, for long. So the
time that steps with drafts lose or save against steps without is added up, as a cumulative sum test
does (Page, 1954, "Continuous inspection schemes"): it ends the drafting once a few steps' time is
lost, however noisy each step, and hardly ever where drafts save much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

__all__ = ["Guard", "Permission"]

_LIMIT = 4.0
"""Time of plain steps that may be lost since drafts last paid, before they end."""

_DOUBT = 2.0
"""What counts as lost already when they begin: they have to prove themselves."""

_MARGIN = 1.02
"""Drafts must save this much: choosing them takes time that no step shows."""

_PAUSE = (64, 1024)
"""Steps without drafts after they did not pay: the first time, and again and again."""

_SHORT_PAUSE = 16
"""The same after drafts that have paid on the whole: it may have been bad luck."""

_COST_SHARE = 0.01
"""Most of the time that failing attempts may take: pauses are so much longer than those lost."""

_MOST_PAUSE = 8192

_PLAIN_EVERY = (24, 64)
"""Steps with drafts after which one without shows what those cost now: while drafts save little or
that is not sure yet, and while they save much. A machine that has become faster looks like a gain.
"""

_MUCH = 0.85
"""Time with drafts, in that without, below which they save much."""

_SURE = 64
"""Steps with drafts after which it is sure."""

_PLAIN_WINDOW = 11
_ENOUGH_PLAIN = 5
"""Steps without drafts that must be known before any are tried."""

_SAMPLED = 4
"""While nothing may be drafted, one step in so many is measured: that is enough, and is cheap."""

_RATIO_WINDOW = 9
_OUTLIER = 2.0
"""A step this many times slower than the median was held up by something else."""

_MOST_AT_ONCE = 2.0
"""What one step can add to the sum."""

_AMORTISED = 32
"""Steps over which a draft model's reading of a sequence is spread: it is read once."""

_IDLE = 16
"""Steps without any draft that was thought to pay, after which nobody looks for some."""

_TRIED, _TRIED_WELL = 2, 12
"""Steps with drafts of an attempt, though they do not promise to pay; and while they do pay."""


class Permission(Enum):
    """What a step may do."""

    NONE = "none"
    PAUSE = "pause"  # none this once, to know what that takes now
    PROMISING = "promising"
    TRIAL = "trial"  # some drafts also if they promise nothing


class Guard:
    """Decides, for each class of batch sizes, whether steps may have drafts.

    Classes are powers of two. In each, nothing is drafted until steps without drafts are measured;
    then an attempt begins, which lasts as long as it does not lose. After one that lost, there is a
    pause of ``_PAUSE`` steps, doubled each time, and long enough that attempts take no more than
    ``_COST_SHARE`` of the time; after one that ended with a gain, a short one.

    Args:
        shape: seconds of a step without drafts, by number of sequences, up to a factor.
    """

    def __init__(self, shape: Callable[[int], float]) -> None:
        self._shape = shape
        self._classes: dict[int, _Class] = {}
        self._blind = False

    def permit(self, num_sequences: int) -> Permission:
        """What the next step may do; to be asked once for each step."""
        if self._blind:
            return Permission.PROMISING
        return self._of(num_sequences).permit()

    def decline(self, num_sequences: int) -> None:
        """A step had leave to draft, and drafts did not promise to pay."""
        if not self._blind:
            self._of(num_sequences).decline()

    def wants(self, num_sequences: int) -> bool:
        """Whether a step without drafts is to be measured."""
        return self._of(num_sequences).wants()

    def observe_plain(self, num_sequences: int, seconds: float) -> None:
        """A step of decodes without drafts has ended."""
        self._of(num_sequences).observe_plain(seconds / self._shape(num_sequences))

    def observe_drafted(
        self,
        num_sequences: int,
        num_tokens: int,
        verify: tuple[float, float],
        draft: tuple[float, float],
    ) -> None:
        """A step of decodes with drafts has ended.

        Args:
            num_sequences: of the step.
            num_tokens: that they got.
            verify: seconds of the target, measured and expected.
            draft: seconds of the draft model, likewise.
        """
        state = self._of(num_sequences)
        plain = state.plain * self._shape(num_sequences)
        if plain <= 0:
            return  # not timed yet: drafts of a step that was planned before
        state.observe_ratio(verify[0] / verify[1])
        drafting = min(draft)
        seconds, late = verify[0] + drafting, draft[0] - drafting
        state.observe_drafted(num_tokens / num_sequences, seconds / plain, late / plain)

    def observe_unknown(self) -> None:
        """Nobody times the steps: there is nothing to judge by, and promises must do."""
        self._blind = True

    def _of(self, num_sequences: int) -> _Class:
        key = num_sequences.bit_length() if num_sequences < 2 else (num_sequences - 1).bit_length()
        state = self._classes.get(key)
        if state is None:
            state = self._classes[key] = _Class()
        return state


class _Class:
    """Steps of about as many sequences. Times are in steps without drafts."""

    __slots__ = (
        "_counted",
        "_failures",
        "_idle",
        "_late",
        "_lost",
        "_on",
        "_pause",
        "_plain_times",
        "_ratios",
        "_seconds",
        "_since_plain",
        "_steps",
        "_sum",
        "plain",
    )

    def __init__(self) -> None:
        self.plain = 0.0
        self._plain_times: deque[float] = deque(maxlen=_PLAIN_WINDOW)
        self._ratios: deque[float] = deque(maxlen=_RATIO_WINDOW)
        self._on, self._counted = False, False
        self._pause = self._failures = 0
        self._since_plain = self._idle = self._steps = 0
        self._sum = self._lost = self._late = self._seconds = 0.0

    def permit(self) -> Permission:
        if not self._on:
            self._pause -= 1
            if self._pause > 0 or len(self._plain_times) < _ENOUGH_PLAIN:
                return Permission.NONE
            self._begin()
        if self._since_plain >= _PLAIN_EVERY[self._saves_much()]:
            self._since_plain = 0
            return Permission.PAUSE
        pays = self._sum <= _DOUBT and self._steps < _TRIED_WELL
        if self._steps < _TRIED or pays:
            return Permission.TRIAL
        return Permission.PROMISING

    def _saves_much(self) -> bool:
        return self._steps >= _SURE and self._seconds < _MUCH * (self._seconds - self._lost)

    def decline(self) -> None:
        self._idle += 1
        if self._idle >= _IDLE:
            self._end()

    def wants(self) -> bool:
        return self._on or len(self._plain_times) < _PLAIN_WINDOW or self._pause % _SAMPLED == 0

    def observe_plain(self, seconds: float) -> None:
        self._since_plain = 0
        self._plain_times.append(seconds)
        # The lower quartile: other load only ever slows steps down, and a slow stretch must not
        # make the drafts after it look cheap.
        self.plain = sorted(self._plain_times)[len(self._plain_times) // 4]

    def observe_ratio(self, ratio: float) -> None:
        """A step with drafts took so many times what was expected of it."""
        self._ratios.append(ratio)

    def observe_drafted(self, gained: float, seconds: float, late: float) -> None:
        """A step gave ``gained`` plain steps' tokens, and took so long, reading up apart."""
        self._since_plain += 1
        self._steps += 1
        self._idle = 0
        if not self._on:
            return  # it was planned before drafting ended
        self._late += late
        charged = self._late / _AMORTISED
        self._late -= charged
        ratios = self._ratios
        held_up = len(ratios) > 2 and ratios[-1] > _OUTLIER * _median(ratios)
        if held_up and self._counted:
            self._counted = False  # two in a row are no accident
            return
        self._counted = True
        seconds += charged
        self._lost += seconds - gained
        self._seconds += seconds
        loss = min(_MARGIN * seconds - gained, _MOST_AT_ONCE)
        self._sum = max(0.0, self._sum + loss)
        if self._sum >= _LIMIT:
            self._end()

    def _begin(self) -> None:
        self._on, self._counted = True, False
        self._sum, self._lost, self._late, self._seconds = _DOUBT, 0.0, 0.0, 0.0
        self._steps = self._idle = self._since_plain = 0

    def _end(self) -> None:
        self._on = False
        if self._lost < 0:
            self._pause, self._failures = _SHORT_PAUSE, 0
            return
        pause = min(_PAUSE[0] << self._failures, _PAUSE[1])
        self._failures = min(self._failures + 1, 8)
        self._pause = int(min(max(pause, self._lost / _COST_SHARE), _MOST_PAUSE))


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]

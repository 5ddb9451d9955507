"""Lets a worker draft only where drafts are measured to pay, whatever costs and rates promise.

What a length promises rests on fits: of costs, of acceptance. A fit may be wrong, on a busy machine
or for a workload that changes; then drafting would be slower than not drafting, for long. So the
time that steps with drafts lose or save against steps without is added up, as a cumulative sum test
does (Page, 1954, "Continuous inspection schemes"): it ends the drafting once a few steps' time is
lost, however noisy each step, and hardly ever where drafts save much.

Machines become slower and faster, by half within a second. A step with drafts is therefore judged
only when steps without have been timed before and after it, and by both: else whatever slows the
machine down would look like a loss, and end drafts that pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

__all__ = ["Guard", "Permission", "size_class"]

_LIMIT = 4.0
"""Time of plain steps that may be lost since drafts last paid, before they end."""

_BANKED = (0.25, 12.0)
"""Share of what an attempt has saved that may be lost beyond that, and the most of it: where drafts
have paid for long, a bad second is more likely the machine's than theirs."""

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

_PLAIN_EVERY = (6, 24, 64)
"""Steps with drafts after which one without shows what those cost now: while it is not sure yet
that drafts save anything, while they save little, and while they save much."""

_MUCH = 0.85
"""Time with drafts, in that without, below which they save much."""

_SURE = 48
"""Steps with drafts after which it is sure."""

_SUSPECTED = 0.5
"""Share of what may be lost that may seem so since the last steps without drafts, before there are
some again."""

_PLAIN_WINDOW = 3
"""Steps without drafts whose median is what such a step takes now; and how many of them are made in
a row where drafts seem to lose."""

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
    PROVEN = "proven"  # as promising, in a step that nobody can judge: others like it have paid
    TASTE = "taste"  # one of each at most: what they cost may be quite unlike what is thought
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
        self._timed: bool | None = None  # not known before the first step

    def permit(self, num_sequences: int) -> Permission:
        """What the next step may do, of decodes alone; to be asked once for each step."""
        if self._timed is False:
            return Permission.PROMISING
        return self._of(num_sequences).permit()

    def permit_beside_prompts(self, num_sequences: int) -> Permission:
        """The same of a step that reads prompts, too; ``num_sequences`` of it decode.

        What such a step would take without drafts is not measured. So nothing is tried in it, and
        drafts that promise to pay must have paid in steps of decodes alone.
        """
        if self._timed is False:
            return Permission.PROMISING
        return self._of(num_sequences).permit_beside_prompts()

    def decline(self, num_sequences: int) -> None:
        """A step had leave to draft, and drafts did not promise to pay."""
        if self._timed:
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
        state, shape = self._of(num_sequences), self._shape(num_sequences)
        if state.plain <= 0:
            return  # not timed yet: drafts of a step that was planned before
        state.observe_ratio(verify[0] / verify[1])
        drafting = min(draft)
        seconds, late = verify[0] + drafting, draft[0] - drafting
        state.observe_drafted(num_tokens / num_sequences, seconds / shape, late / shape)

    def observe_timing(self, timed: bool) -> None:
        """A step has ended, whatever was in it, and somebody has timed it or not.

        As long as none was timed there is nothing to judge by, and promises must do. Later a step
        without a time is one that raised, or whose copies failed: it is not judged, no more.
        """
        self._timed = timed or bool(self._timed)

    def _of(self, num_sequences: int) -> _Class:
        key = size_class(num_sequences)
        state = self._classes.get(key)
        if state is None:
            state = self._classes[key] = _Class()
        return state


class _Class:
    """Steps of about as many sequences. Times are over the shape, or in steps without drafts."""

    __slots__ = (
        "_counted",
        "_failures",
        "_idle",
        "_late",
        "_lost",
        "_num_plain",
        "_on",
        "_pause",
        "_pausing",
        "_pending",
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
        self._num_plain = 0
        self._ratios: deque[float] = deque(maxlen=_RATIO_WINDOW)
        self._pending: list[tuple[float, float]] = []
        self._on, self._counted = False, False
        self._pause = self._failures = self._pausing = 0
        self._since_plain = self._idle = self._steps = 0
        self._sum = self._lost = self._late = self._seconds = 0.0

    def permit(self) -> Permission:
        if not self._on:
            self._pause -= 1
            if self._pause > 0 or self._num_plain < _ENOUGH_PLAIN:
                return Permission.NONE
            self._begin()
        if not self._pausing and self._since_plain >= _PLAIN_EVERY[self._certainty()]:
            self._pausing = 1
        if self._pausing:
            return Permission.PAUSE
        if not self._steps:
            return Permission.TASTE
        pays = self._sum <= _DOUBT and self._steps < _TRIED_WELL
        if self._steps < _TRIED or pays:
            return Permission.TRIAL
        return Permission.PROMISING

    def permit_beside_prompts(self) -> Permission:
        if not self._on:
            self._pause -= 1
            return Permission.NONE
        return Permission.PROVEN if self._lost < 0 else Permission.PAUSE

    def _certainty(self) -> int:
        """That drafts save: 0 for none yet, 1 for little, 2 for much."""
        if self._steps < _SURE:
            return 0
        return 1 + (self._seconds < _MUCH * (self._seconds - self._lost))

    def decline(self) -> None:
        self._idle += 1
        if self._idle >= _IDLE:
            self._end()

    def wants(self) -> bool:
        return self._on or self._num_plain < _ENOUGH_PLAIN or self._pause % _SAMPLED == 0

    def observe_plain(self, seconds: float) -> None:
        self._since_plain = 0
        self._pausing = max(0, self._pausing - 1)
        self._num_plain += 1
        before = self.plain or seconds
        self._plain_times.append(seconds)
        self.plain = _median(self._plain_times)
        if not self._pausing:
            self._judge((before + self.plain) / 2)

    def observe_ratio(self, ratio: float) -> None:
        """A step with drafts took so many times what was expected of it."""
        self._ratios.append(ratio)

    def observe_drafted(self, gained: float, seconds: float, late: float) -> None:
        """A step gave ``gained`` plain steps' tokens, and took so long, reading up apart.

        Args:
            gained: number of steps without drafts that give as many tokens.
            seconds: over :attr:`Guard`'s shape.
            late: of the draft model beyond what was expected, likewise.
        """
        self._since_plain += 1
        self._steps += 1
        self._idle = 0
        if not self._on:
            return  # it was planned before drafting ended
        self._late += late
        ratios = self._ratios
        held_up = len(ratios) > 2 and ratios[-1] > _OUTLIER * _median(ratios)
        if held_up and self._counted:
            self._counted = False  # two in a row are no accident
            return
        self._counted = True
        charged = self._late / _AMORTISED
        self._late -= charged
        self._pending.append((gained, seconds + charged))
        if self._loss(self.plain) >= _SUSPECTED * self._limit():
            self._pausing = _PLAIN_WINDOW

    def _loss(self, plain: float) -> float:
        """What steps that are not judged yet have lost, if one without drafts takes so long."""
        return sum([_MARGIN * seconds / plain - gained for gained, seconds in self._pending])

    def _judge(self, plain: float) -> None:
        for gained, seconds in self._pending:
            taken = seconds / plain
            self._lost += taken - gained
            self._seconds += taken
            self._sum = max(0.0, self._sum + min(_MARGIN * taken - gained, _MOST_AT_ONCE))
        self._pending.clear()
        if self._on and self._sum >= self._limit():
            self._end()

    def _limit(self) -> float:
        share, most = _BANKED
        return _LIMIT + min(most, max(0.0, -self._lost) * share)

    def _begin(self) -> None:
        self._on, self._counted = True, False
        self._sum, self._lost, self._late, self._seconds = _DOUBT, 0.0, 0.0, 0.0
        self._steps = self._idle = self._since_plain = self._pausing = 0
        self._pending.clear()

    def _end(self) -> None:
        self._on = False
        self._lost += self._late  # what was read in vain was paid for, too
        if self._lost < 0:
            self._pause, self._failures = _SHORT_PAUSE, 0
            return
        pause = min(_PAUSE[0] << self._failures, _PAUSE[1])
        self._failures = min(self._failures + 1, 8)
        self._pause = int(min(max(pause, self._lost / _COST_SHARE), _MOST_PAUSE))


def size_class(num_sequences: int) -> int:
    """Which class of batch sizes it is: they end with the powers of two."""
    return num_sequences.bit_length() if num_sequences < 2 else (num_sequences - 1).bit_length()


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]

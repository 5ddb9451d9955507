"""The measured gain of drafts at one class of batch sizes, which turns them on and off.

Measurement turns drafts on, not prediction. The speed of a shared machine changes by half within a
second. So each step with drafts is timed against the plain steps just before and after it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from ..scheduling.cost_fit import CostFit
from .draft_choice import FREE, Prices

__all__ = ["BatchClass", "Mode", "Work"]

_ON_GAIN, _OFF_GAIN = 1.05, 1.01
"""A probe turns drafts on if it reaches the first gain; a gain below the second turns them off.
Between the two nothing changes, so noise does not make drafts flap. Steps that find nothing to
draft pull the gain to 1, which must turn drafts off, too."""

_PLAIN_STEPS = 4
"""Plain steps before and after a probe. Drafts must beat the mean time of the last ones."""

_PROBE_STEPS = 16
"""Steps of a probe. Some 30 tokens a sequence suffice to tell a gain of 10 % from none."""

_BLIND_STEPS = 4
"""Of these, the first, which draft whatever that promises: what drafts cost may have changed since.
All sequences draft from texts, and the draft model for one of them. In the others, and as long as
drafts are on, only those are made that pay."""

_MAX_PERIOD = 64
"""Most steps with drafts between two plain ones. The plain ones then cost 1 or 2 % of the time."""

_WINDOW = 32
"""Steps over which the gain is averaged, and over which the draft model's reading time is
spread."""

_LOSS_LIMIT = 4.0
"""When drafts seem to have lost the time of so many plain steps, plain steps check whether they
did."""

_PROBE_SHARE = 0.01
"""Share of the time that failed probes may cost. It decides how long the pause after one lasts."""

_MIN_PAUSE, _MAX_PAUSE = 64, 8192
"""Bounds of that pause, in steps. Some pause follows even a cheap failure, and no stall of the
machine during a probe may end drafting for good."""

_STEPS_A_LESSON = 4
"""Of steps that find nothing to draft, the class learns costs from one in so many. To learn takes a
thirtieth of a small model's step."""

_MOST_DOUBLINGS = 3
"""The draft model's pause is twice as long after each further probe of it in a row that failed, so
many times. Texts are asked anew all the time: one may begin to repeat itself."""

_OUTLIER = 2.0
"""Something else held up a step that took more than so many times the prediction. It counts as so
many times. If all steps stay slow, the predictions follow within some ten steps."""

_TYPICAL_LENGTH = 4
"""Until more is known, so many drafts for every sequence are taken to cost at most a step's
time."""


_HOST_RISES, _HOST_FALLS = 0.1, 0.5
"""How far the usual time outside the model follows a step's. A pause of the process is no step's
own, so it follows less time sooner than more."""


class Work(Enum):
    """What a step does for drafts."""

    NONE = auto()
    LOOK_UP = auto()  # it looks for drafts, and verifies none
    VERIFY = auto()


class Mode(Enum):
    """What a class does with drafts."""

    OFF = auto()
    PROBE = auto()  # for some steps, the first of which draft whatever that promises
    ON = auto()


class BatchClass:
    """Steps of about as many decoding sequences, and what drafts cost and gain in them.

    OFF: no drafts, until some plain steps were timed or a pause is over. PROBE: a few steps with
    drafts, of which the first draft whatever that promises. ON: drafts where they pay, with a plain
    step now and then, and more rarely while the gain holds.

    Where drafts may also come without the draft model, a loss pauses it alone, and a probe of the
    others follows.

    Args:
        most_sequences: of a step.
        has_others: whether drafts may also come from elsewhere than the draft model.

    Attributes:
        mode: the present one.
        gain: tokens per time relative to plain steps, in about the last 32 steps of the present
            probe or ON phase. Steps in which nothing was worth drafting count, too.
        num_drafted: steps with drafts so far.
        most_drafts: of all sequences in one such step so far.
        plain_due: how many of the next steps, of decodes alone, must go without drafts.
    """

    def __init__(self, most_sequences: int, *, has_others: bool = False) -> None:
        self.mode = Mode.OFF
        self.gain = 1.0
        self.num_drafted = 0
        self.most_drafts = 0
        self._has_others = has_others
        self.plain_due = _PLAIN_STEPS
        self._model_pause = 0  # steps left
        self._model_failures = 0  # probes in a row that it failed
        self._plain_times: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._plain_s = 0.0
        self._host: dict[Work, float] = {}  # time outside the model, in parts of that in it
        # Of a step, of any drafts in it, of each draft.
        self._verify = CostFit((1, 1, _TYPICAL_LENGTH * most_sequences))
        self._rounds = CostFit((1,))
        self._untaught = 0  # steps since the last that costs were learned from
        self._begin()

    def _begin(self) -> None:
        self._steps, self._period = 0, _PROBE_STEPS
        self._has_asked, self._lost_asking = False, 0.0
        self._lost = self._earned = self._taken = self._reading_s = 0.0
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._num_pending, self._asks_pending = 0, False
        self._pending_earned = self._pending_s = 0.0

    def may_draft(self) -> bool:
        """Whether the next step, of decodes alone, may have drafts."""
        return self.plain_due == 0

    @property
    def knows_rounds(self) -> bool:
        """Whether it is known what a round of the draft model takes."""
        return self._rounds.known

    @property
    def idle_steps(self) -> int:
        """For how many steps there is nothing to learn: a pause without its last, timed ones."""
        return max(0, self.plain_due - _PLAIN_STEPS) if self.mode is Mode.OFF else 0

    def skip(self, steps: int) -> None:
        """Count so many steps of a pause that nobody has observed."""
        self.plain_due -= steps
        self._model_pause = max(0, self._model_pause - steps)

    def must_draft(self) -> bool:
        """Whether drafts must be made whatever they promise, so that their cost becomes known."""
        steps = self._steps + self._num_pending
        return self.mode is Mode.PROBE and steps < _BLIND_STEPS

    def may_ask(self) -> bool:
        """Whether these drafts may be the draft model's."""
        return self._model_pause == 0

    def prices(self, num_sequences: int) -> Prices:
        """What drafts cost, at the throughput that was measured."""
        if not self._plain_s or not self.num_drafted:
            return FREE
        tokens_per_s = num_sequences * max(1.0, self.gain) / self._plain_s
        _, step, token = self._verify.costs
        return Prices(
            step * tokens_per_s, token * tokens_per_s, self._rounds.costs[0] * tokens_per_s
        )

    def observe_host(self, work: Work, model_s: float, host_s: float) -> None:
        """Learn how long a step of decodes took outside the model, where look-ups take their time.

        The next steps count it as a share of the model's time, since a machine that slows down
        slows both. Without any call the share is 0.
        """
        share = host_s / model_s
        usual = self._host.setdefault(work, share)
        self._host[work] += (_HOST_RISES if share > usual else _HOST_FALLS) * (share - usual)

    def _host_share(self, work: Work) -> float:
        """Usual time outside the model in a step of this kind, in parts of that in it."""
        return self._host.get(work, 0.0)

    def observe_plain(self, seconds: float) -> None:
        """Learn from a step without drafts, of decodes alone."""
        self._model_pause -= self._model_pause > 0
        if self.plain_due > _PLAIN_STEPS:
            self.plain_due -= 1  # a pause: only its last steps are needed
            return
        of_plain = self._host_share(Work.NONE)
        seconds *= 1 + of_plain
        if self._verify.known:
            # Noise may let drafts explain all of a step's time, and then its own cost is 0.
            usual = max(self._verify.costs[0], self._plain_s)
            seconds = min(seconds, _OUTLIER * usual)
        self._untaught = 0 if self.plain_due else (self._untaught + 1) % _STEPS_A_LESSON
        if not self._untaught:
            self._verify.learn((1.0, 0.0, 0.0), seconds)
        self._plain_times.append(seconds)
        before = self._plain_s
        self._plain_s = sum(self._plain_times) / len(self._plain_times)
        if self.plain_due:
            self.plain_due -= 1
            if self.plain_due:
                return
            if self.mode is Mode.OFF:
                self.mode = Mode.PROBE
                self._begin()
                return
        else:
            # No sequence had drafts that were worth it.
            taken = (1 + max(of_plain, self._host_share(Work.LOOK_UP))) / (1 + of_plain)
            self._lost += taken - 1
            self._count(1, 1.0, taken)
        self._judge((before + self._plain_s) / 2)

    def observe_drafted(
        self,
        num_drafts: int,
        earned: float,
        verify_s: float,
        rounds: int,
        draft_s: float,
        *,
        typical: bool,
    ) -> None:
        """Learn from a step with drafts, of decodes alone.

        Args:
            num_drafts: of all sequences.
            earned: number of plain steps that give as many tokens.
            verify_s: seconds of the target.
            rounds: forward passes of the draft model.
            draft_s: its seconds.
            typical: the draft model neither failed nor had to read up, so costs can be learned.
        """
        self._model_pause -= self._model_pause > 0
        if not self._plain_s:
            return
        verify_s += (verify_s + draft_s) * self._host_share(Work.VERIFY)
        amounts = (1.0, 1.0, float(num_drafts))
        if self.num_drafted:
            verify_s = min(verify_s, _OUTLIER * max(self._verify.predict(amounts), self._plain_s))
        expected = self._rounds.predict((rounds,)) if self._rounds.known else 0.0
        if typical:
            self.num_drafted += 1
            self.most_drafts = max(self.most_drafts, num_drafts)
            self._verify.learn(amounts, verify_s)
            if draft_s:
                self._rounds.learn((rounds,), draft_s)
                expected = expected or draft_s
        if self.mode is Mode.OFF:
            return  # planned before drafts were turned off
        self._asks_pending |= rounds > 0
        usual = min(draft_s, expected)
        self._reading_s += draft_s - usual
        # A probe asks what drafts gain in the long run, when the draft model has caught up.
        reading = self._reading_s / _WINDOW if self.mode is Mode.ON else 0.0
        self._reading_s -= reading
        self._num_pending += 1
        self._pending_earned += earned
        self._pending_s += verify_s + usual + reading
        loses = self._pending_s / self._plain_s - self._pending_earned > _LOSS_LIMIT
        if self._num_pending >= self._period or loses:
            careful = self.mode is Mode.PROBE or loses
            self.plain_due = _PLAIN_STEPS if careful else 1

    def _judge(self, plain_s: float) -> None:
        """Count pending steps against plain ones that take ``plain_s``, and switch if it is due."""
        taken = self._pending_s / plain_s
        whole_period = self._num_pending >= self._period
        failed = taken - self._pending_earned > _LOSS_LIMIT
        self._lost += taken - self._pending_earned
        if self._asks_pending:
            self._has_asked = True
            self._lost_asking += taken - self._pending_earned
        self._count(self._num_pending, self._pending_earned, taken)
        self._forget_pending()
        if self.mode is Mode.PROBE:
            if failed or self._steps >= _PROBE_STEPS:
                if self.gain >= _ON_GAIN:
                    self.mode = Mode.ON
                    if self._has_asked:
                        self._model_failures = 0
                else:
                    self._turn_off(plain_s)
        elif self.gain < _OFF_GAIN:
            self._turn_off(plain_s)
        elif whole_period:
            self._period = min(2 * self._period, _MAX_PERIOD)

    def _count(self, steps: int, earned: float, taken: float) -> None:
        """Let the gain follow steps that took ``taken`` plain steps' time and earned as much."""
        memory = (1 - 1 / _WINDOW) ** steps
        self._steps += steps
        self._earned = memory * self._earned + earned
        self._taken = memory * self._taken + taken
        self.gain = self._earned / self._taken

    def _turn_off(self, plain_s: float) -> None:
        fails_probe = self.mode is Mode.PROBE
        self.mode = Mode.OFF
        self.gain = 1.0
        blames_model = self._has_asked and self._has_others
        lost = self._lost_asking if blames_model else self._lost
        lost += self._reading_s / plain_s
        pause = max(_MIN_PAUSE, lost / _PROBE_SHARE)
        if self._has_asked and fails_probe:
            pause *= 2 ** min(self._model_failures, _MOST_DOUBLINGS)
            self._model_failures += 1
        pause = int(min(pause, _MAX_PAUSE))
        if blames_model:
            self._model_pause, pause = pause, _PLAIN_STEPS  # what do the others gain alone?
        self.plain_due = pause

"""Speculative decoding: how many drafts each sequence gets in a step, and from where.

A step verifies a sequence's drafts beside its last token and takes those the model agrees with
(Leviathan, Kalman and Matias, 2023; Chen et al., 2023). Drafts cost time whether they are taken or
not. What they cost and how often they are taken is measured all the time, and each step gets as
many as promise the most tokens per second; often that is none. What is promised must also be kept:
see ``speculation_guard``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.shared.protocol import Speculation

from .drafting import Drafting, Source
from .plan import Span
from .speculation_cost import FREE, Calibration, StepCosts, StepTiming
from .speculation_guard import Guard, Permission
from .speculation_length import Pool, best_lengths, cut, expected_gain, worth_verifying

__all__ = ["Choice", "SpeculationConfig", "SpeculationStats", "Speculator"]

_SMOOTHING = 0.02
"""Weight of one sequence's step in the worker's mean acceptance rate."""

_GAIN_SMOOTHING = 0.02
"""Weight of one step in the gain that is shown."""

_TRIAL_LENGTH = 2

_TRIAL_COST = 2.0
"""A step that tries drafts which promise nothing may be expected to take so much longer."""

_TYPICAL_LENGTH = 4
"""By which sources are compared, before it is known how many drafts there will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What may be drafted.

    Attributes:
        ngram: whether sequences may have drafts from their own text.
        draft: whether the model side has a draft model.
        length: drafts of each sequence in each step; None lets measurement decide.
        longest: most drafts of a sequence in one step, where measurement decides.
        calibration: what steps cost at start.
    """

    ngram: bool = True
    draft: bool = False
    length: int | None = None
    longest: int = 7
    calibration: Calibration = FREE


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals since the start, and what holds now.

    Attributes:
        drafted: drafts verified, by source (of matches of all lengths together) and position, where
            1 is the first draft of a step.
        accepted: those taken, likewise.
        text_length: drafts that a sequence with a text match has in the present steps.
        draft_length: drafts that the draft model proposes for a sequence in the present steps.
        gain: tokens per second of recent steps, over what they would have been without drafts.
    """

    drafted: Mapping[tuple[Speculation, int], int]
    accepted: Mapping[tuple[Speculation, int], int]
    text_length: int
    draft_length: int
    gain: float


@dataclass(slots=True)
class Choice:
    """Drafts for one span.

    Attributes:
        index: of the span.
        source: where they come from.
        rate: how likely each is accepted once those before it were.
        count: how many.
        drafts: the tokens, at least ``count``; empty where the draft model is to propose them.
    """

    index: int
    source: Source
    rate: float
    count: int
    drafts: tuple[int, ...] = ()


class Speculator:
    """Chooses the drafts of each step, and learns from what became of them.

    Pure: what steps took is told to it.

    Args:
        config: what may be drafted.
        max_model_len: tokens of prompt and output that the model's context holds.
        max_span: most query tokens of one sequence in one step.
    """

    def __init__(self, config: SpeculationConfig, max_model_len: int, max_span: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        wanted = config.longest if config.length is None else config.length
        self._longest = min(wanted, max_span - 1)
        self._costs = StepCosts(config.calibration)
        self._guard = Guard(self._costs.timed)
        self._means = {(source, warmth): source.prior for source in Source for warmth in range(4)}
        self._draft_share = 1.0
        self._text_length = self._draft_length = 0
        self._drafted: Counter[tuple[Speculation, int]] = Counter()
        self._accepted: Counter[tuple[Speculation, int]] = Counter()
        self._gain = 1.0
        self._changed = False
        self._shown = SpeculationStats({}, {}, 0, 0, 1.0)

    # -- before a step --------------------------------------------------------------------------

    def choose(self, spans: Sequence[Span], budget: int) -> list[Choice]:
        """Drafts for a step that is planned but for them.

        Args:
            spans: the step so far.
            budget: query tokens that are left.

        Returns:
            Choices in the order of the spans, of ``budget`` drafts at most together.
        """
        permission = Permission.PROMISING
        if self._config.length is None:
            permission = self._guard.permit(len(spans))
            if permission is Permission.NONE:
                self._show_lengths(0, 0)
            if permission in (Permission.NONE, Permission.PAUSE):
                return []  # before anything is looked up: not to draft must cost nothing
        self._draft_share = self._costs.worth_of_drafting(len(spans))
        choices = [choice for index in range(len(spans)) if (choice := self._look(index, spans))]
        if not choices:
            return choices
        if self._config.length is None:
            self._adapt(choices, spans, permission)
        left = budget
        for choice in choices:
            choice.count = min(choice.count, left)
            left -= choice.count
        return [choice for choice in choices if choice.count]

    def _look(self, index: int, spans: Sequence[Span]) -> Choice | None:
        """The best source for a span, with as many drafts as could be of use."""
        span = spans[index]
        sequence = span.sequence
        if not span.samples or span.start < sequence.num_prompt_tokens or span.num_tokens != 1:
            return None  # a prompt, or what is computed again after a preemption
        if sequence.num_candidates:
            return None  # a beam: its next token is not sampled
        if sequence.grammar is not None:
            return None  # what may follow is known for its next token alone
        wish = sequence.options.speculation
        if wish is Speculation.OFF:
            return None
        num_tokens = len(sequence.token_ids)
        room = min(
            sequence.options.max_tokens + sequence.num_prompt_tokens - num_tokens,
            self._max_model_len - num_tokens,
        )
        most = min(self._longest, room - 1)  # a step gives one token more than it accepts
        if most < 1:
            return None
        drafting = sequence.drafting
        if drafting is None:
            drafting = sequence.drafting = Drafting()
        choice, warmth = None, _warmth(sequence.options.temperature)
        if self._config.ngram and wish is not Speculation.DRAFT:
            drafts, match = drafting.look_up(sequence.token_ids, most)
            if match:
                source = Source.of_match(match)
                rate = drafting.rate(source, self._means[source, warmth])
                choice = Choice(index, source, rate, most, drafts)
        if self._config.draft and wish is not Speculation.NGRAM:
            rate = drafting.rate(Source.DRAFT, self._means[Source.DRAFT, warmth])
            # What stands in the text costs no model: the draft model must be so much surer.
            if choice is None or _typical_gain(choice.rate) < self._draft_share * _typical_gain(
                rate
            ):
                choice = Choice(index, Source.DRAFT, rate, most)
        if choice is not None and self._config.length is None:
            # One more with every draft seen: a sequence nobody can guess is found out cheaply.
            choice.count = min(most, 1 + int(drafting.tried(choice.source)))
        return choice

    def _adapt(self, choices: list[Choice], spans: Sequence[Span], permission: Permission) -> None:
        """Shorten the choices to what promises the most tokens per second."""
        num_sequences = len(spans)
        num_prompt = sum([span.num_tokens for span in spans]) - num_sequences
        text = _pool([c.rate for c in choices if c.source.is_text], self._text_length)
        draft = _pool([c.rate for c in choices if not c.source.is_text], self._draft_length)
        text_length, draft_length, promised = best_lengths(
            self._costs, num_sequences, num_prompt, text, draft, self._longest
        )
        self._show_lengths(
            text_length if text.count else self._text_length,
            draft_length if draft.count else self._draft_length,
        )
        if text_length == draft_length == 0:
            if permission is Permission.TRIAL:
                self._try(choices, num_sequences)
            else:
                _limit(choices, 0, 0)
                self._guard.decline(num_sequences)
            return
        _limit(choices, text_length, draft_length)
        num_drafts = sum([choice.count for choice in choices])
        worth = worth_verifying(self._costs, num_sequences, num_drafts, promised)
        for choice in choices:
            choice.count = cut(choice.rate, choice.count, worth)

    def _show_lengths(self, text: int, draft: int) -> None:
        if (text, draft) != (self._text_length, self._draft_length):
            self._text_length, self._draft_length = text, draft
            self._changed = True

    def _try(self, choices: list[Choice], num_sequences: int) -> None:
        """Shorten the choices to a few drafts, of as many sequences as do not cost too much."""
        most = _TRIAL_COST * self._costs.verify(num_sequences, 0)
        tried = 0
        for choice in choices:
            choice.count = min(choice.count, _TRIAL_LENGTH)
            each = (tried + 1) * _TRIAL_LENGTH / num_sequences
            seconds = self._costs.verify(num_sequences, each)
            seconds += self._costs.draft(tried + 1, _TRIAL_LENGTH)
            if tried and seconds > most:
                choice.count = 0
            else:
                tried += 1

    # -- after a step ---------------------------------------------------------------------------

    def observe(self, span: Span, num_drafted: int, num_accepted: int) -> None:
        """Drafts of a span were verified.

        Args:
            span: whose drafts.
            num_drafted: how many there were.
            num_accepted: how many of them the model agreed with, before one it did not.
        """
        drafting, source = span.sequence.drafting, span.source
        assert drafting is not None
        assert source is not None
        drafting.observe(source, num_drafted, num_accepted)
        refused = num_accepted < num_drafted
        kind = Speculation.NGRAM if source.is_text else Speculation.DRAFT
        for position in range(1, num_drafted + 1):
            self._drafted[kind, position] += 1
        for position in range(1, num_accepted + 1):
            self._accepted[kind, position] += 1
        tried = num_accepted + refused
        if tried:
            weight = 1 - (1 - _SMOOTHING) ** tried
            key = source, _warmth(span.sequence.options.temperature)
            self._means[key] += weight * (num_accepted / tried - self._means[key])

    def observe_step(
        self, spans: Sequence[Span], num_sampled: int, timing: StepTiming | None
    ) -> None:
        """A step has ended.

        Args:
            spans: of the step.
            num_sampled: tokens that its sequences got.
            timing: what it took, if that is known.
        """
        if timing is None:
            self._guard.observe_unknown()
        num_drafts = sum([span.num_drafts for span in spans])
        self._changed |= num_drafts > 0
        num_sequences, costs, guard = len(spans), self._costs, self._guard
        if timing is None or not (num_drafts or guard.wants(num_sequences)):
            return
        if any(span.num_tokens != 1 for span in spans):
            return
        asking = [span.num_drafts for span in spans if span.num_drafts and not span.drafts]
        drafting = costs.draft(len(asking), max(asking, default=0))
        verify_seconds = timing.seconds - timing.draft_seconds
        if num_drafts:
            expected = costs.verify(num_sequences, num_drafts / num_sequences)
            guard.observe_drafted(
                num_sequences,
                num_sampled,
                (verify_seconds, expected),
                (timing.draft_seconds, drafting),
            )
        else:
            guard.observe_plain(num_sequences, timing.seconds)
        if asking:
            costs.observe_draft(len(asking), max(asking), timing.draft_seconds)
        costs.observe_verify(num_sequences, num_drafts / num_sequences, verify_seconds)
        plain_rate = num_sequences / costs.verify(num_sequences, 0)
        gain = num_sampled / timing.seconds / plain_rate
        self._gain += _GAIN_SMOOTHING * (gain - self._gain)

    def stats(self) -> SpeculationStats:
        """Counts so far and the present lengths: the same object as long as they are the same."""
        if self._changed:
            self._changed = False
            self._shown = SpeculationStats(
                dict(self._drafted),
                dict(self._accepted),
                self._text_length,
                self._draft_length,
                self._gain,
            )
        return self._shown


def _warmth(temperature: float) -> int:
    """Temperatures that are guessed about equally well."""
    return (temperature > 0) + (temperature > 0.7) + (temperature > 1.2)


def _typical_gain(rate: float) -> float:
    return 1 + expected_gain(rate, _TYPICAL_LENGTH)


def _pool(rates: list[float], present: int) -> Pool:
    return Pool(len(rates), sum(rates) / len(rates) if rates else 0.0, present)


def _limit(choices: Iterable[Choice], text_length: int, draft_length: int) -> None:
    for choice in choices:
        choice.count = min(choice.count, text_length if choice.source.is_text else draft_length)

"""Speculative decoding: how many drafts each sequence gets in a step, and from where.

A step verifies a sequence's drafts beside its last token and takes those the model agrees with
(Leviathan, Kalman and Matias, 2023; Chen et al., 2023). Drafts cost time whether they are taken or
not. What they cost and how often they are taken is measured all the time, and each step gets as
many as promise the most tokens per second; often that is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.shared.protocol import Speculation

from .drafting import Drafting, Source
from .plan import Span
from .speculation_cost import FREE, Calibration, StepCosts, StepTiming
from .speculation_length import Pool, best_lengths, cut, expected_gain, worth_verifying

__all__ = ["Choice", "SpeculationConfig", "SpeculationStats", "Speculator"]

_SMOOTHING = 0.02
"""Weight of one sequence's step in the worker's mean acceptance rate."""

_GAIN_SMOOTHING = 0.02
"""Weight of one step in the gain that is shown."""

_PROBE_EVERY = (64, 1024)
"""Steps without drafts, while there could be some, after which a few are tried: at first, and when
trying has changed nothing again and again."""

_PROBE_LENGTH = 2

_TYPICAL_LENGTH = 4
"""By which sources are compared, before it is known how many drafts there will be."""

_PLAIN_EVERY = 64
"""Steps with drafts after which one without shows what those cost now."""


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
        self._means = {(source, warmth): source.prior for source in Source for warmth in range(4)}
        self._draft_share = 1.0
        self._text_length = self._draft_length = 0
        self._probe_every = _PROBE_EVERY[0]
        self._since_drafts = self._since_plain = 0
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
        self._draft_share = self._costs.worth_of_drafting(len(spans))
        choices = [choice for index in range(len(spans)) if (choice := self._look(index, spans))]
        if not choices:
            return choices
        if self._config.length is None:
            self._adapt(choices, spans)
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

    def _adapt(self, choices: list[Choice], spans: Sequence[Span]) -> None:
        """Shorten the choices to what promises the most tokens per second."""
        if self._since_plain >= _PLAIN_EVERY:
            _limit(choices, 0, 0)
            return
        num_sequences = len(spans)
        num_prompt = sum([span.num_tokens for span in spans]) - num_sequences
        text = _pool([c.rate for c in choices if c.source.is_text], self._text_length)
        draft = _pool([c.rate for c in choices if not c.source.is_text], self._draft_length)
        text_length, draft_length, promised = best_lengths(
            self._costs, num_sequences, num_prompt, text, draft, self._longest
        )
        if text.count:
            self._text_length = text_length
        if draft.count:
            self._draft_length = draft_length
        if text_length == draft_length == 0:
            self._changed |= self._since_drafts == 0
            self._since_drafts += 1
            if self._since_drafts >= self._probe_every:
                self._since_drafts = 0
                self._probe_every = min(2 * self._probe_every, _PROBE_EVERY[1])
                _limit(choices, _PROBE_LENGTH, _PROBE_LENGTH)
            else:
                _limit(choices, 0, 0)
            return
        self._since_drafts = 0
        self._probe_every = _PROBE_EVERY[0]
        _limit(choices, text_length, draft_length)
        num_drafts = sum([choice.count for choice in choices])
        worth = worth_verifying(self._costs, num_sequences, num_drafts, promised)
        for choice in choices:
            choice.count = cut(choice.rate, choice.count, worth)

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
        num_drafts = sum([span.num_drafts for span in spans])
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        self._changed |= num_drafts > 0
        if timing is None or any(span.num_tokens != 1 for span in spans):
            return
        num_sequences, costs = len(spans), self._costs
        asking = [span.num_drafts for span in spans if span.num_drafts and not span.drafts]
        if asking:
            costs.observe_draft(len(asking), max(asking), timing.draft_seconds)
        verify_seconds = timing.seconds - timing.draft_seconds
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

"""Speculative decoding: how many drafts each sequence gets in a step, and from where.

A step verifies a sequence's drafts beside its last token and takes those the model agrees with
(Leviathan, Kalman and Matias, 2023; Chen et al., 2023). Drafts cost time whether they are taken or
not. What they cost and how often they are taken is measured all the time, and each step gets as
many as promise the most tokens per second; often that is none. What is promised must also be kept:
see ``speculation_guard``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.shared.protocol import Speculation

from ..plan import Span
from .assignment import Ways
from .draft_length import Pool, best_lengths, cut, worth_verifying
from .draft_state import Drafting, Source
from .draft_strategy import Choice, LineUp, limit, line_up
from .guard import Guard, Permission
from .speculation_config import SpeculationConfig, SpeculationStats
from .verification_cost import StepCosts, StepTiming

__all__ = ["Choice", "SpeculationConfig", "SpeculationStats", "Speculator"]

_SMOOTHING = 0.02
"""Weight of one sequence's step in the worker's mean acceptance rate."""

_GAIN_SMOOTHING = 0.02
"""Weight of one step in the gain that is shown."""

_TRIAL_COST = 2.0
"""A step that tries drafts which promise nothing may be expected to take so much longer."""

_FIRST_LENGTH = 3
"""Drafts of a sequence of which no outcome is known; it may have one more with every one seen."""

_READING = 1024
"""Tokens that one step may read into the indexes of texts, of all sequences together (0.2 us each).
A long prompt, or all that came in a pause, is read over several steps."""

_READING_EACH = 16
"""Tokens that each sequence may read beside that: so whoever has caught up never falls behind."""

_READ_ALONG = 1
"""Steps that a draft model may have missed, to be thought to have read a sequence. What it must
read takes as long as several proposals: taken for their price, it would let nobody ask it often
enough to read less."""

_TRYING = (Permission.TASTE, Permission.TRIAL)
"""Steps that draft also where it does not promise to pay."""

_Situation = tuple[int, int, Pool, Pool, bool]
"""Sequences, prompt tokens, those with a match and those without, and whether some must be."""


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
        self._reading = self._step = 0
        self._ways = Ways()
        self._found: dict[_Situation, tuple[int, int, float]] = {}
        fixed = 0 if config.length is None else self._longest
        self._text_length, self._draft_length = fixed * config.ngram, fixed * config.draft
        self._drafted: Counter[tuple[Speculation, int]] = Counter()
        self._accepted: Counter[tuple[Speculation, int]] = Counter()
        self._gain = 1.0
        self._changed = False
        self._shown = SpeculationStats({}, {}, self._text_length, self._draft_length, self._gain)

    # -- before a step --------------------------------------------------------------------------

    def choose(self, spans: Sequence[Span], budget: int) -> list[Choice]:
        """Drafts for a step that is planned but for them.

        Args:
            spans: the step so far.
            budget: query tokens that are left.

        Returns:
            Choices in the order of the spans, of ``budget`` drafts at most together.
        """
        permission, self._step = Permission.PROMISING, self._step + 1
        if self._config.length is None:
            permission = self._permit(spans)
            if permission is Permission.NONE:
                self._show_lengths(0, 0)
            if permission in (Permission.NONE, Permission.PAUSE):
                return []  # before anything is looked up: not to draft must cost nothing
        self._reading = _READING
        found = [both for index in range(len(spans)) if (both := self._look(index, spans))]
        if not found:
            return []
        if self._config.length is None:
            choices = self._adapt(found, spans, permission)
        else:
            choices = self._lined_up(LineUp.SURER, found, len(spans))
        left = budget
        for choice in choices:
            choice.count = min(choice.count, left)
            left -= choice.count
        chosen = [choice for choice in choices if choice.count]
        for choice in chosen:
            drafting = spans[choice.index].sequence.drafting
            if drafting is not None and not choice.drafts:
                drafting.ask(self._step)
        return chosen

    def _permit(self, spans: Sequence[Span]) -> Permission:
        num_decodes = sum([span.num_tokens == 1 for span in spans])
        if num_decodes == len(spans):
            return self._guard.permit(num_decodes)
        if not num_decodes:
            return Permission.PAUSE
        return self._guard.permit_beside_prompts(num_decodes)

    def _look(self, index: int, spans: Sequence[Span]) -> list[Choice] | None:
        """The sources there are for a span, its own text first, with as many drafts as may be."""
        span = spans[index]
        sequence = span.sequence
        if not span.samples or span.start < sequence.num_prompt_tokens or span.num_tokens != 1:
            return None  # a prompt, or what is computed again after a preemption
        if sequence.num_candidates:
            return None  # a beam: its next token is not sampled
        form = sequence.grammar
        if form is not None and not form.may_draft:
            return None
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
        found, warmth = [], _warmth(sequence.options.temperature)
        if self._config.ngram and wish is not Speculation.DRAFT:
            num_read = drafting.read(sequence.token_ids, _READING_EACH + self._reading)
            self._reading -= max(0, num_read - _READING_EACH)
            drafts, match = drafting.look_up(sequence.token_ids, most)
            if match and form is not None:
                # What its form forbids is refused for sure: cut before it costs anything.
                allowed = form.num_allowed(sequence.token_ids, sequence.num_prompt_tokens, drafts)
                drafts = drafts[:allowed]
            if drafts:
                source = Source.of_match(match)
                rate = drafting.rate(source, self._means[source, warmth])
                found.append(Choice(index, source, rate, len(drafts), drafts))
        if self._config.draft and wish is not Speculation.NGRAM:
            rate = drafting.rate(Source.DRAFT, self._means[Source.DRAFT, warmth])
            found.append(Choice(index, Source.DRAFT, rate, most))
        if self._config.length is None:
            for choice in found:
                # A sequence nobody can guess is found out cheaply.
                known = int(drafting.tried(choice.source))
                choice.count = min(choice.count, _FIRST_LENGTH + known)
        return found or None

    def _lined_up(self, way: LineUp, found: list[list[Choice]], num_sequences: int) -> list[Choice]:
        return line_up(way, found, self._costs.worth_of_drafting(num_sequences))

    def _adapt(
        self, found: list[list[Choice]], spans: Sequence[Span], permission: Permission
    ) -> list[Choice]:
        """Of what there is for each sequence, what promises the most tokens per second."""
        num_sequences = len(spans)
        if self._ways.is_due(num_sequences):
            self._found.clear()  # costs are others by now
            promised = {
                way: self._lengths(self._lined_up(way, found, num_sequences), spans, permission)[2]
                for way in LineUp
            }
            self._ways.compare(num_sequences, promised)
        choices = self._lined_up(self._ways.present(num_sequences), found, num_sequences)
        choices = choices or self._lined_up(LineUp.SURER, found, num_sequences)
        text_length, draft_length, promised_rate = self._lengths(choices, spans, permission)
        has_text = any(choice.source.is_text for choice in choices)
        has_draft = any(not choice.source.is_text for choice in choices)
        self._show_lengths(
            text_length if has_text else self._text_length,
            draft_length if has_draft else self._draft_length,
        )
        most = 1 if permission is Permission.TASTE else self._longest
        limit(choices, min(text_length, most), min(draft_length, most))
        some = permission in _TRYING
        if text_length == draft_length == 0:
            if permission is not Permission.PROVEN:
                self._guard.decline(num_sequences)
        elif some and promised_rate < num_sequences / self._costs.verify(num_sequences, 0):
            self._try(choices, num_sequences)
        else:
            num_drafts = sum([choice.count for choice in choices])
            worth = worth_verifying(self._costs, num_sequences, num_drafts, promised_rate)
            for choice in choices:
                choice.count = cut(choice.rate, choice.count, worth)
        return choices

    def _lengths(
        self, choices: list[Choice], spans: Sequence[Span], permission: Permission
    ) -> tuple[int, int, float]:
        """See :func:`best_lengths`; found anew where something is another, and now and then."""
        num_sequences = len(spans)
        text = _pool([c.rate for c in choices if c.source.is_text], self._text_length)
        draft = _pool([c.rate for c in choices if not c.source.is_text], self._draft_length)
        num_prompt = sum([span.num_tokens for span in spans]) - num_sequences
        some = permission in _TRYING
        key = num_sequences, num_prompt, text, draft, some
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = best_lengths(
                self._costs, num_sequences, num_prompt, text, draft, self._longest, some=some
            )
        return found

    def _show_lengths(self, text: int, draft: int) -> None:
        if (text, draft) != (self._text_length, self._draft_length):
            self._text_length, self._draft_length = text, draft
            self._changed = True

    def _try(self, choices: list[Choice], num_sequences: int) -> None:
        """Keep as many choices as do not cost too much, though they do not promise to pay."""
        most = _TRIAL_COST * self._costs.verify(num_sequences, 0)
        num_drafts, asking, longest = 0, 0, 0
        for choice in choices:
            asks = not choice.drafts
            length = max(longest, choice.count) if asks else longest
            each = (num_drafts + choice.count) / num_sequences
            seconds = self._costs.verify(num_sequences, each)
            seconds += self._costs.draft(asking + asks, length)
            if num_drafts and seconds > most:
                choice.count = 0
            else:
                num_drafts, asking, longest = num_drafts + choice.count, asking + asks, length

    # -- after a step ---------------------------------------------------------------------------

    def observe(self, span: Span, num_drafted: int, num_accepted: int, num_used: int) -> None:
        """Drafts of a span were verified.

        Args:
            span: whose drafts.
            num_drafted: how many there were.
            num_accepted: how many of them the model agreed with, before one it did not.
            num_used: how many of those became output; the others lie behind its end.
        """
        drafting, source = span.sequence.drafting, span.source
        assert drafting is not None
        assert source is not None
        drafting.observe(source, num_drafted, num_accepted)
        refused = num_accepted < num_drafted
        kind = Speculation.NGRAM if source.is_text else Speculation.DRAFT
        for position in range(1, num_drafted + 1):
            self._drafted[kind, position] += 1
        for position in range(1, num_used + 1):
            self._accepted[kind, position] += 1
        tried = num_accepted + refused
        if tried:
            weight = 1 - (1 - _SMOOTHING) ** tried
            key = source, _warmth(span.sequence.options.temperature)
            self._means[key] += weight * (num_accepted / tried - self._means[key])

    def observe_step(
        self,
        spans: Sequence[Span],
        num_sampled: int,
        timing: StepTiming | None,
        *,
        failed: bool = False,
    ) -> None:
        """A step has ended.

        Args:
            spans: of the step.
            num_sampled: tokens that its sequences got, of which none lie behind an output's end.
            timing: what it took, if that is known.
            failed: the drafter did. Such a step tells what drafts are worth, and not what they or
                verifying them cost.
        """
        self._guard.observe_timing(timing is not None)
        num_drafts = sum([span.num_drafts for span in spans])
        self._changed |= num_drafts > 0
        num_sequences, costs, guard = len(spans), self._costs, self._guard
        if timing is None or not (num_drafts or guard.wants(num_sequences)):
            return
        if any(span.num_tokens != 1 for span in spans):
            return
        asked = [span for span in spans if span.num_drafts and not span.drafts]
        asking = [span.num_drafts for span in asked]
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
        if failed:
            return
        if asking and not any(_is_behind(span) for span in asked):
            costs.observe_draft(len(asking), max(asking), timing.draft_seconds)
        costs.observe_verify(num_sequences, num_drafts / num_sequences, verify_seconds)
        plain_rate = num_sequences / costs.verify(num_sequences, 0)
        gain = num_sampled / timing.seconds / plain_rate
        self._gain += _GAIN_SMOOTHING * (gain - self._gain)
        self._changed = True

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


def _is_behind(span: Span) -> bool:
    """Whether the draft model had to read up, which is no cost of proposing."""
    drafting = span.sequence.drafting
    return drafting is not None and drafting.missed > _READ_ALONG


def _warmth(temperature: float) -> int:
    """Temperatures that are guessed about equally well."""
    return (temperature > 0) + (temperature > 0.7) + (temperature > 1.2)


def _pool(rates: list[float], present: int) -> Pool:
    """Rates to one in 50: they are not known any better, and what follows is looked up."""
    mean = round(sum(rates) / len(rates) * 50) / 50 if rates else 0.0
    return Pool(len(rates), mean, present)

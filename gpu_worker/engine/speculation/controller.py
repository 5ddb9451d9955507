"""Speculative decoding: how many drafts each sequence gets in a step, and from which source.

A step verifies a sequence's drafts beside its last token, and keeps those with which the model
agrees (Leviathan et al., 2023; Chen et al., 2023). The engine makes these calls:

- :meth:`Speculator.choose`, once a step is planned, for the drafts to add to it;
- :meth:`Speculator.observe`, for each span whose drafts were verified;
- :meth:`Speculator.observe_step`, once a step has ended, with the time it took, and
  :meth:`Speculator.observe_host` with the time around it.

Whether a batch size drafts at all is measured (:mod:`.batch_class`); sources and lengths follow
from acceptance and cost (:mod:`.draft_choice`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.shared.protocol.states import Speculation

from ..output.step_output import StepTiming
from ..plan import DraftSource, Span
from ..sequence import Sequence as TokenSequence
from .acceptance_rate import AcceptanceRate
from .batch_class import BatchClass, Mode, Work
from .draft_choice import FREE, DraftOption, choose_drafts
from .draft_state import DraftState
from .speculation_config import SpeculationConfig, SpeculationStats

__all__ = ["DraftOption", "SpeculationConfig", "SpeculationStats", "Speculator"]

_EVEN_ODDS = 0.5
"""Acceptance rate of a source before any of its drafts was verified."""

_READING = 1024
"""Tokens of all sequences together that one step may read into n-gram indexes (0.2 ms or so). It
spreads a long prompt, or the output of a pause, over several steps."""

_READING_EACH = 16
"""Tokens that each sequence may read beyond that, more than a step adds: once an index is complete
it stays so."""


class Speculator:
    """Chooses the drafts of each step and learns from their outcome.

    Pure: it is told how long steps took.

    Args:
        config: what may be drafted.
        max_model_len: tokens of prompt and output in the model's context.
        max_span: most query tokens of one sequence in one step.
    """

    def __init__(self, config: SpeculationConfig, max_model_len: int, max_span: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        longest = config.longest if config.length is None else config.length
        self._longest = min(longest, max_span - 1)
        self._classes: dict[int, BatchClass] = {}
        self._rates: dict[tuple[DraftSource, bool], AcceptanceRate] = {}
        self._states: dict[TokenSequence, DraftState] = {}  # of live sequences that could draft
        self._reading = 0
        self._catching_up = False
        self._drafted: Counter[tuple[Speculation, int]] = Counter()
        self._accepted: Counter[tuple[Speculation, int]] = Counter()
        self._gain = 1.0
        self._looks_up = False  # for the step that runs
        self._observed: tuple[BatchClass, Work, float] | None = None  # the last step, if measured
        self._stats = SpeculationStats({}, {}, 1.0)
        self._changed = False

    # -- before a step --------------------------------------------------------------------------

    def choose(self, spans: Sequence[Span], budget: int) -> list[DraftOption]:
        """Choose drafts for a planned step.

        Args:
            spans: of the step, without drafts.
            budget: query tokens that are left.

        Returns:
            One option for each span that drafts, in their order; at most ``budget`` drafts in all.
        """
        prices, probing, may_ask, most = FREE, True, self._config.draft, self._longest
        if self._config.length is None:
            num_decodes = sum([span.num_tokens == 1 for span in spans])
            batch = self._batch_class(num_decodes)
            # Beside prompts nothing is measured, so drafts must have proved their gain elsewhere.
            measured = num_decodes == len(spans) and batch.may_draft()
            if not measured and (batch.mode is not Mode.ON or num_decodes in (0, len(spans))):
                return []  # before any look-up: not drafting must cost nothing
            prices, probing = batch.prices(num_decodes), batch.mode is Mode.PROBE
            may_ask = may_ask and batch.may_ask()
            # The first steps draft little, because the cost of drafts is not known yet.
            most = min(most, batch.num_drafted + 1)
        self._looks_up = True
        self._reading = _READING
        found = [
            both
            for i, span in enumerate(spans)
            if (both := self._options(i, span, most, may_ask=may_ask))
        ]
        chosen = choose_drafts(found, prices, probing=probing) if found else []
        self._catching_up = False
        for option in chosen:
            option.count = min(option.count, budget)
            budget -= option.count
            if option.count and not option.drafts:
                self._note_reading(spans[option.index].sequence)
        return [option for option in chosen if option.count]

    def stays_plain(self, num_sequences: int) -> bool:
        """Whether the step after the one in flight has no drafts, whatever that one gives.

        Both steps decode ``num_sequences`` sequences. ``plain_due`` still counts the one in flight.
        """
        return self._config.length is None and self._batch_class(num_sequences).plain_due > 1

    def _batch_class(self, num_sequences: int) -> BatchClass:
        """Classes end with the powers of two."""
        key = (num_sequences - 1).bit_length() if num_sequences else -1
        batch = self._classes.get(key)
        if batch is None:
            has_both = self._config.ngram and self._config.draft
            batch = self._classes[key] = BatchClass(1 << max(key, 0), has_others=has_both)
        return batch

    def _options(self, index: int, span: Span, most: int, *, may_ask: bool) -> list[DraftOption]:
        """What a span could draft, own text first, each of at most ``most`` tokens.

        The draft model's only if it may be asked.
        """
        sequence = span.sequence
        options, wish = sequence.options, sequence.options.speculation
        constraint = sequence.constraint
        if (
            wish is Speculation.OFF
            or not span.samples
            or span.num_tokens != 1
            or span.start < sequence.num_prompt_tokens
            or sequence.num_candidates  # a beam's next token is not sampled
            or (constraint is not None and not constraint.may_draft)
        ):
            return []
        token_ids = sequence.token_ids
        room = min(options.max_tokens + sequence.num_prompt_tokens, self._max_model_len)
        # A step gives one token more than it accepts.
        most = min(most, room - len(token_ids) - 1)
        if most < 1:
            return []
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = DraftState()
        sampled = options.temperature > 0
        found = []
        if self._config.ngram and wish is not Speculation.DRAFT:
            num_read = state.read(token_ids, _READING_EACH + self._reading)
            self._reading -= max(0, num_read - _READING_EACH)
            drafts, match = state.look_up(token_ids, most)
            if match and constraint is not None:
                # The model refuses what its constraint forbids: cut it before it costs anything.
                count = constraint.num_allowed(token_ids, sequence.num_prompt_tokens, drafts)
                drafts = drafts[:count]
            if drafts:
                source = DraftSource.of_match(match)
                rate = state.rate(source, self._mean(source, sampled))
                found.append(DraftOption(index, source, rate, len(drafts), drafts))
        if may_ask and wish is not Speculation.NGRAM:
            rate = state.rate(DraftSource.DRAFT, self._mean(DraftSource.DRAFT, sampled))
            found.append(DraftOption(index, DraftSource.DRAFT, rate, most))
        return found

    def _mean(self, source: DraftSource, sampled: bool) -> float:
        """The worker's rate; drafts of greedy requests are right more often than sampled ones."""
        rate = self._rates.get((source, sampled))
        return _EVEN_ODDS if rate is None else rate.rate(_EVEN_ODDS)

    def _note_reading(self, sequence: TokenSequence) -> None:
        """Note whether the draft model must read more of the sequence than the last step's tokens.

        Reading takes as long as many proposals. Taken for their price, it would keep the draft
        model from being asked often enough to read less.
        """
        state = self._states[sequence]
        num_tokens = len(sequence.token_ids)
        self._catching_up |= num_tokens - state.num_read > self._longest + 1
        state.num_read = num_tokens

    # -- after a step ---------------------------------------------------------------------------

    def observe(self, span: Span, num_drafted: int, num_accepted: int, num_used: int) -> None:
        """Learn from the verified drafts of a span.

        Args:
            span: whose drafts.
            num_drafted: number of verified drafts.
            num_accepted: how many the model agreed with, before the first it did not.
            num_used: how many of those became output; the others lie behind its end.
        """
        sequence, source = span.sequence, span.source
        assert source is not None
        kind = Speculation.NGRAM if source.is_text else Speculation.DRAFT
        for position in range(1, num_drafted + 1):
            self._drafted[kind, position] += 1
        for position in range(1, num_used + 1):
            self._accepted[kind, position] += 1
        self._changed = True
        if not num_drafted:
            return
        if (state := self._states.get(sequence)) is not None:  # else it has just ended
            state.observe(source, num_drafted, num_accepted)
        key = source, sequence.options.temperature > 0
        mean = self._rates.get(key)
        if mean is None:
            mean = self._rates[key] = AcceptanceRate()
        mean.fade()
        mean.observe(num_drafted, num_accepted)

    def observe_step(
        self,
        spans: Sequence[Span],
        num_sampled: int,
        timing: StepTiming | None,
        *,
        failed: bool = False,
    ) -> None:
        """Learn from the time of a step.

        Args:
            spans: of the step.
            num_sampled: tokens that its sequences got, without those behind an output's end.
            timing: the time it took; None if it is not known.
            failed: the drafter failed. Such a step tells what drafts gain, not what they cost.
        """
        looks_up, self._looks_up, self._observed = self._looks_up, False, None
        if timing is None or timing.seconds <= 0 or self._config.length is not None:
            return
        if any(span.num_tokens != 1 for span in spans):
            return
        num_sequences = len(spans)
        batch = self._batch_class(num_sequences)
        num_drafts = sum([span.num_drafts for span in spans])
        if num_drafts:
            rounds = max([span.num_drafts for span in spans if not span.drafts], default=0)
            batch.observe_drafted(
                num_drafts,
                num_sampled / num_sequences,
                timing.seconds - timing.draft_seconds,
                rounds,
                timing.draft_seconds,
                typical=not failed and not (rounds and self._catching_up),
            )
            self._observed = batch, Work.VERIFY, timing.seconds
        else:
            batch.observe_plain(timing.seconds)
            work = Work.LOOK_UP if looks_up else Work.NONE
            self._observed = batch, work, timing.seconds
        self._gain = batch.gain if batch.mode is Mode.ON else 1.0
        self._changed |= self._gain != self._stats.gain

    def observe_host(self, seconds: float) -> None:
        """Learn how long the last observed step took outside the model."""
        if self._observed is not None:
            batch, work, model_s = self._observed
            batch.observe_host(work, model_s, seconds)

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the drafting state of a sequence that has ended."""
        self._states.pop(sequence, None)

    def stats(self) -> SpeculationStats:
        """Counts so far and the present gain; the same object until something changes."""
        if self._changed:
            self._changed = False
            self._stats = SpeculationStats(dict(self._drafted), dict(self._accepted), self._gain)
        return self._stats

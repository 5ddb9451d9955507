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
from collections.abc import Mapping, Sequence
from itertools import chain

from penstock.shared.protocol.states import Speculation

from ..output.step_output import StepTiming
from ..plan import Span
from ..sequence import Sequence as TokenSequence
from .batch_class import BatchClass, Mode, Work
from .draft_choice import FREE, DraftOption, choose_drafts
from .draft_options import DraftOptions
from .speculation_config import SpeculationConfig, SpeculationStats

__all__ = ["DraftOption", "SpeculationConfig", "SpeculationStats", "Speculator"]

_GROWTH = 2
"""A step has at most so many times the drafts that any step had before. Nobody knows what more
would cost."""

_LEAST_CHANCE = 0.25
"""Where prices are not known or not looked at, the memory makes no drafts of a smaller chance."""

_STEPS_A_LESSON = 8
"""During a pause, the controller learns the time around the model from one step in so many."""

_SHORTEST_REST = 16
"""Steps of a pause below which it is not worth skipping them."""


class _Rest:
    """A pause's idle steps, which cost next to nothing: they are only counted.

    It ends with the first step that has another number of spans. Which of them are prompts does not
    matter.

    Attributes:
        num_spans: of each step; 0: there is no rest.
    """

    def __init__(self) -> None:
        self.num_spans = 0
        self._batch: BatchClass | None = None
        self._left = self._passed = 0

    def begin(self, batch: BatchClass, num_spans: int) -> None:
        """Begin one if ``batch`` has enough idle steps."""
        if batch.idle_steps >= _SHORTEST_REST:
            self.num_spans, self._batch, self._left = num_spans, batch, batch.idle_steps
            self._passed = 0

    @property
    def lesson(self) -> BatchClass | None:
        """The class that learns the time around the step that was counted last; mostly none."""
        return None if self._passed % _STEPS_A_LESSON else self._batch

    def count(self, num_spans: int) -> bool:
        """Count a step that has ended; False: it had another number of spans."""
        if num_spans != self.num_spans:
            if self._batch is not None:
                self._end()
            return False
        self._passed += 1
        if self._passed == self._left:
            self._end()
        return True

    def _end(self) -> None:
        assert self._batch is not None
        self._batch.skip(self._passed)
        self.num_spans, self._batch = 0, None


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
        longest = config.longest if config.length is None else config.length
        self._longest = min(longest, max_span - 1)
        self._options = DraftOptions(config, max_model_len, self._longest)
        self._classes: dict[int, BatchClass] = {}
        self._catching_up = False
        self._rest = _Rest()
        self._drafted: Counter[tuple[Speculation, int]] = Counter()  # spans by number of drafts
        self._accepted: Counter[tuple[Speculation, int]] = Counter()  # by those that became output
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
        if len(spans) == self._rest.num_spans:
            return []
        prices, probing, may_ask, most = FREE, True, self._config.draft, self._longest
        one_asks = must_ask = False
        known = budget
        if self._config.length is None:
            num_decodes = sum([span.num_tokens == 1 for span in spans])
            batch = self._batch_class(num_decodes)
            # Beside prompts nothing is measured, so drafts must have proved their gain elsewhere.
            measured = num_decodes == len(spans) and batch.may_draft()
            if not measured and (batch.mode is not Mode.ON or num_decodes in (0, len(spans))):
                return []  # before any look-up: not drafting must cost nothing
            prices, probing = batch.prices(num_decodes), batch.must_draft()
            may_ask = may_ask and batch.may_ask()
            # One tells what a round costs. To draft for all, the model may have to read long texts.
            one_asks, must_ask = probing, not batch.knows_rounds
            # The first steps draft little, because the cost of drafts is not known yet.
            most = min(most, batch.num_drafted + 1)
            known = _GROWTH * batch.most_drafts or num_decodes
        self._looks_up = True
        least = _LEAST_CHANCE if probing or prices is FREE else prices.token
        self._options.begin_step()
        found: list[list[DraftOption]] = []
        for i, span in enumerate(spans):
            options = self._options.of(i, span, most, least, may_ask=may_ask)
            if not options:
                continue
            if one_asks and not options[-1].source.is_text:
                may_ask = False
                options = options[-1:] if must_ask else options
            found.append(options)
        self._catching_up = False
        if not found:
            return []
        _shorten(found, known)
        chosen = choose_drafts(found, prices, probing=probing)
        for option in chosen:
            option.count = min(option.count, budget)
            budget -= option.count
            if option.count and not option.drafts:
                self._catching_up |= self._options.catches_up(spans[option.index].sequence)
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
            has_both = (self._config.ngram or self._config.memory) and self._config.draft
            batch = self._classes[key] = BatchClass(1 << max(key, 0), has_others=has_both)
        return batch

    # -- after a step ---------------------------------------------------------------------------

    def observe(self, span: Span, num_drafted: int, num_accepted: int, num_used: int) -> None:
        """Learn from the verified drafts of a span.

        Args:
            span: whose drafts.
            num_drafted: number of verified drafts.
            num_accepted: how many the model agreed with, before the first it did not.
            num_used: how many of those became output; the others lie behind its end.
        """
        source = span.source
        assert source is not None
        kind = Speculation.NGRAM if source.is_text else Speculation.DRAFT
        self._drafted[kind, num_drafted] += 1
        self._accepted[kind, num_used] += 1
        self._changed = True
        if num_drafted:
            self._options.observe(span, num_drafted, num_accepted)

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
        self._options.learn_some()
        num_sequences = len(spans)
        rests = self._rest.count(num_sequences)
        if rests and self._rest.lesson is None:
            return
        if timing is None or timing.seconds <= 0 or self._config.length is not None:
            return
        if sum([span.num_tokens for span in spans]) != num_sequences:
            return
        if rests and (idle := self._rest.lesson) is not None:
            # Beside a probe a plain step's code is in no cache, and the time around it longer.
            self._observed = idle, Work.NONE, timing.seconds
            return
        batch = self._batch_class(num_sequences)
        num_drafts = sum([span.num_drafts for span in spans]) if looks_up else 0
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
            self._rest.begin(batch, num_sequences)
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
        """Drop the drafting state of a sequence that has ended; the memory keeps its output."""
        self._options.forget(sequence)

    def stats(self) -> SpeculationStats:
        """Counts so far and the present gain; the same object until something changes."""
        if self._changed:
            self._changed = False
            drafted, accepted = _by_position(self._drafted), _by_position(self._accepted)
            self._stats = SpeculationStats(drafted, accepted, self._gain)
        return self._stats


def _shorten(found: list[list[DraftOption]], most: int) -> None:
    """Leave at most so many drafts of all sequences together, and at least one of each."""
    if sum([max([option.count for option in options]) for options in found]) <= most:
        return
    del found[most:]
    each = max(1, most // len(found))
    for option in chain.from_iterable(found):
        option.count = min(option.count, each)


def _by_position(
    by_length: Mapping[tuple[Speculation, int], int],
) -> dict[tuple[Speculation, int], int]:
    """How often there was a draft at each position, from how often there were so many."""
    counts: Counter[tuple[Speculation, int]] = Counter()
    for (kind, length), count in by_length.items():
        for position in range(1, length + 1):
            counts[kind, position] += count
    return dict(counts)

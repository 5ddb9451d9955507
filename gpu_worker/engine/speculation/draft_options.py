"""What each sequence could draft, and how often such drafts were accepted."""

from __future__ import annotations

from operator import mul

from penstock.shared.protocol.states import Speculation

from ..plan import DraftSource, Span
from ..sequence import Sequence
from .acceptance_rate import AcceptanceRate
from .draft_choice import DraftOption, even_chances
from .draft_state import DraftState
from .output_memory import OutputMemory
from .speculation_config import SpeculationConfig

__all__ = ["DraftOptions"]

_EVEN_ODDS = 0.5
"""Acceptance rate of a source before any of its drafts was verified. The memory of outputs knows
the chances of its drafts, and is taken at its word."""

_READING = 1024
"""Tokens of all sequences together that one step may read into n-gram indexes (0.2 ms or so). It
spreads a long prompt, or the output of a pause, over several steps."""

_READING_EACH = 16
"""Tokens that each sequence may read beyond that, more than a step adds: once an index is complete
it stays so."""


class DraftOptions:
    """Finds drafts in texts, and knows how likely those of each source are to be right.

    Args:
        config: what may be drafted.
        max_model_len: tokens of prompt and output in the model's context.
        longest: most drafts of a sequence in one step.
    """

    def __init__(self, config: SpeculationConfig, max_model_len: int, longest: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._longest = longest
        self._memory = OutputMemory() if config.memory else None
        self._states: dict[Sequence, DraftState] = {}  # of live sequences that were in a step
        self._rates: dict[tuple[DraftSource, bool], AcceptanceRate] = {}
        self._reading = 0
        self._ended: tuple[Sequence, DraftState] | None = None  # the last one

    def begin_step(self) -> None:
        """A step is planned: its sequences may read as much as in any other."""
        self._reading = _READING

    def of(
        self, index: int, span: Span, most: int, least: float, *, may_ask: bool
    ) -> list[DraftOption]:
        """What a span could draft, texts first.

        Args:
            index: of the span in the step.
            span: the span.
            most: most drafts of each option.
            least: drafts of the memory with a smaller chance are left out.
            may_ask: whether the draft model may be asked.
        """
        sequence = span.sequence
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = self._begin(sequence)
        if not span.samples or span.num_tokens != 1 or span.start < sequence.num_prompt_tokens:
            return []
        # A step gives one token more than it accepts.
        most = min(most, state.room - len(sequence.token_ids) - 1)
        constraint = sequence.constraint
        if most < 1 or not (constraint is None or constraint.may_draft):
            return []
        found = self._from_texts(index, sequence, state, most, least) if state.has_texts else []
        if may_ask and state.asks_model:
            rate = state.rate(DraftSource.DRAFT, self._mean(DraftSource.DRAFT, sequence))
            found.append(DraftOption(index, DraftSource.DRAFT, even_chances(rate, most), most))
        return found

    def _begin(self, sequence: Sequence) -> DraftState:
        options, wish = sequence.options, sequence.options.speculation
        room = min(options.max_tokens + sequence.num_prompt_tokens, self._max_model_len)
        if wish is Speculation.OFF or sequence.num_candidates:
            room = 0  # also of a beam, whose next token is not sampled
        has_texts = self._config.ngram or self._config.memory
        return DraftState(
            room=room,
            has_texts=has_texts and wish is not Speculation.DRAFT,
            asks_model=self._config.draft and wish is not Speculation.NGRAM,
        )

    def _from_texts(
        self, index: int, sequence: Sequence, state: DraftState, most: int, least: float
    ) -> list[DraftOption]:
        """What the sequence's own text and the memory of outputs propose."""
        found = []
        token_ids, source = sequence.token_ids, None
        if self._config.ngram:
            num_read = state.read(token_ids, _READING_EACH + self._reading)
            if num_read > _READING_EACH:
                self._reading -= num_read - _READING_EACH
            drafts, match = state.look_up(token_ids, most)
            if drafts:
                source = DraftSource.of_match(match)
                rate = state.rate(source, self._mean(source, sequence))
                if drafts := _allowed(sequence, drafts):
                    count = len(drafts)
                    option = DraftOption(index, source, even_chances(rate, count), count, drafts)
                    found.append(option)
        if self._memory is not None and source is not DraftSource.NGRAM_LONG:
            drafts = self._memory.propose(sequence, state, most, least)
            if drafts and (drafts := _allowed(sequence, drafts)):
                trust = state.rate(DraftSource.MEMORY, self._mean(DraftSource.MEMORY, sequence))
                count = len(drafts)
                chances = list(map(mul, state.chances, even_chances(min(1.0, trust), count)))
                found.append(DraftOption(index, DraftSource.MEMORY, chances, count, drafts))
        return found

    def _mean(self, source: DraftSource, sequence: Sequence) -> float:
        """The worker's rate; drafts of greedy requests are right more often than sampled ones."""
        rate = self._rates.get((source, sequence.options.temperature > 0))
        prior = 1.0 if source is DraftSource.MEMORY else _EVEN_ODDS
        return prior if rate is None else rate.rate(prior)

    def catches_up(self, sequence: Sequence) -> bool:
        """Whether the draft model, which is asked now, must read more than a step's tokens.

        Reading takes as long as many proposals. Taken for their price, it would keep the draft
        model from being asked often enough to read less.
        """
        state = self._states[sequence]
        num_tokens = len(sequence.token_ids)
        before, state.num_read = state.num_read, num_tokens
        return num_tokens - before > self._longest + 1

    def observe(self, span: Span, num_drafted: int, num_accepted: int) -> None:
        """Learn from the verified drafts of a span.

        Args:
            span: whose drafts.
            num_drafted: number of verified drafts, at least 1.
            num_accepted: how many the model agreed with, before the first it did not.
        """
        sequence, source = span.sequence, span.source
        assert source is not None
        key = source, sequence.options.temperature > 0
        mean = self._rates.get(key)
        if mean is None:
            mean = self._rates[key] = AcceptanceRate()
        mean.fade()
        state = self._states.get(sequence)
        if state is None:
            if self._ended is None or self._ended[0] is not sequence:
                return
            state = self._ended[1]  # the step ended it
        state.observe(source, num_drafted, num_accepted)
        if source is DraftSource.MEMORY:
            mean.observe_expected(state.expected(num_drafted, num_accepted), num_accepted)
        else:
            mean.observe(num_drafted, num_accepted)

    def learn_some(self) -> None:
        """Have the memory take in some of what has ended."""
        if self._memory is not None:
            self._memory.learn_some()

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended.

        The memory keeps its output, unless its request wanted no drafts or searched by beams.
        """
        state = self._states.pop(sequence, None)
        self._ended = None if state is None else (sequence, state)
        wants_drafts = sequence.options.speculation is not Speculation.OFF
        if self._memory is not None and wants_drafts and not sequence.num_candidates:
            self._memory.end(sequence, 0 if state is None else state.num_learned)


def _allowed(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Drafts up to the first that the output's constraint forbids, before they cost anything."""
    if sequence.constraint is None:
        return drafts
    token_ids, begin = sequence.token_ids, sequence.num_prompt_tokens
    return drafts[: sequence.constraint.num_allowed(token_ids, begin, drafts)]

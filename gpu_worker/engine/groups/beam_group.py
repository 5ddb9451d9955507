"""The sequences of a beam search: one per beam, forked and dropped as the search goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..output.output_state import OutputState
from ..output.step_output import StepOutput
from ..requests.engine_request import Update
from ..requests.request_validator import RequestValidator
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from .beam_search import BeamSearch, Continuation, Ended
from .best_of_group import Hypothesis, answer
from .sequence_group import SequenceGroup

__all__ = ["BeamGroup"]


class BeamGroup(SequenceGroup):
    """Advances all beams of a request when the last of them has reported its candidates.

    Beams that report earlier wait. They compute nothing, and keep their blocks unless a more urgent
    sequence needs them. A beam with one continuation keeps its sequence. For every further
    continuation a child shares its blocks, and the first writer gets a copy. Nothing is published
    before the end. A worker that takes over begins anew, because nothing in the search is random.

    Args:
        scheduler: gets the sequences.
        validator: refuses what can never fit.
        sequence: the prompt, which becomes the first beam.
        output: makes the output of a sequence that has none yet.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        validator: RequestValidator,
        sequence: Sequence,
        output: Callable[[Sequence], OutputState],
    ) -> None:
        super().__init__(scheduler, validator, sequence)
        self._prompt_ids = tuple(sequence.token_ids)
        self._new_output = output
        self._search = BeamSearch(
            sequence.options,
            sequence.options.ending_ids(validator.config.eos_token_ids),
            validator.max_output_tokens(sequence),
        )
        self._beams = [sequence]
        self._reported: dict[Sequence, tuple[tuple[int, float], ...]] = {}
        self._numbers = itertools.count(1)
        self._num_generated = 0
        sequence.num_candidates = self._search.num_candidates
        self.members[sequence] = None
        scheduler.add(sequence)

    @property
    def num_unpublished(self) -> int:
        """What all beams of all steps had, until the search is over."""
        return self._num_generated

    def collect(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """See :class:`SequenceGroup`: nothing, until the search is over."""
        del token_ids  # the likeliest token now need not be part of the best beam
        if sequence.num_computed_tokens < sequence.num_tokens:
            # It had reported, lost its blocks and computed them once more, when the step for which
            # it did so completed the group.
            return []
        self._reported[sequence] = output.candidates[sequence]
        if len(self._reported) < len(self._beams):
            return []
        self._num_generated += len(self._beams)
        steps = self._search.advance(self._beams, [self._reported[beam] for beam in self._beams])
        self._reported.clear()
        if not steps:
            self.remove()
            ranked = [self._read(ended) for ended in self._search.ended]
            return answer(self.first, ranked, generated=self._num_generated)
        self._go_on(steps)
        return []

    def _go_on(self, steps: list[Continuation]) -> None:
        old, length = self._beams, self._beams[0].num_tokens
        kept = {step.parent for step in steps}
        for index, beam in enumerate(old):
            if index not in kept:  # before forks, which may want its place
                self._leave(beam)
        self._beams = []
        for parent, token_id in steps:
            beam = old[parent]
            if beam.num_tokens == length:
                beam.token_ids.append(token_id)
            else:  # it goes on in another way already
                child = beam.clone(next(self._numbers), [*beam.token_ids[:length], token_id])
                self.members[child] = None
                self._scheduler.fork(beam, child)
                beam = child
            self._beams.append(beam)

    def _read(self, ended: Ended) -> Hypothesis:
        """The text of an output, and why it has ended."""
        whole, output = Hypothesis(), self._new_output(self.first.clone(0, self._prompt_ids))
        for token_id in ended.token_ids:
            whole.add(output.append((token_id,)))
        return whole

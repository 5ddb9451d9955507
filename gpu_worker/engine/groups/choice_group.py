"""``n`` outputs of one prompt, each streamed as it comes."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shared.protocol.choice_parts import Part
from penstock.shared.protocol.states import Reason

from ..output.output_state import OutputState
from ..output.step_output import StepOutput
from ..requests.engine_request import Finish, Update
from ..requests.request_validator import RequestValidator
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from .sequence_group import SequenceGroup

__all__ = ["ChoiceGroup", "part_of", "summary"]


class ChoiceGroup(SequenceGroup):
    """``n`` outputs of one prompt, each published as it comes.

    The first computes the prompt. Then the others start: they share its blocks and compute only the
    prompt's last token, for logits of their own.

    Args:
        outputs: the choices that go on, by sequence, in order; at least one.
        reasons: why those have ended that another worker brought to their end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        validator: RequestValidator,
        outputs: dict[Sequence, OutputState],
        reasons: Iterable[Reason] = (),
    ) -> None:
        self._outputs = outputs
        first, *held = outputs
        super().__init__(scheduler, validator, first)
        self._reasons = list(reasons)
        self._held = held
        self.members[first] = None
        scheduler.add(first)

    def collect(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """See :class:`SequenceGroup`: one update, of this choice."""
        self._release_held()
        text = self._outputs[sequence]
        update = text.append_run(token_ids, self._validator.pool_tokens)
        update.logprobs = output.logprobs.get(sequence, ())[: len(update.token_ids)]
        update.choice = sequence.choice
        update.cached_tokens = self.first.num_cached_tokens
        if update.finish is not None:
            self._end_choice(sequence, update)
            return [update]
        update.parts = (part_of(update, None),)
        if (finish := self._validator.too_large(sequence)) is not None:
            text.close(update, finish)
            update.parts = (part_of(update, None),)
            self.remove()
        return [update]

    def _release_held(self) -> None:
        """The first has sampled, so the prompt is computed: what waits for it may share it."""
        for sequence in reversed(self._held):  # each goes before the one put before
            sequence.siblings = self.members
            self.members[sequence] = None
            self._scheduler.add_next(sequence)
        self._held.clear()

    def _end_choice(self, sequence: Sequence, update: Update) -> None:
        assert update.finish is not None
        update.parts = (part_of(update, update.finish.reason),)
        self._reasons.append(update.finish.reason)
        self._leave(sequence)
        update.finish = summary(self._reasons) if self.is_over else None


def part_of(update: Update, reason: Reason | None) -> Part:
    """Whose the tokens of an update are, that of a choice which ended for ``reason``, if it did."""
    return Part(update.choice, update.start, len(update.token_ids), update.text, reason)


def summary(reasons: Iterable[Reason | None]) -> Finish:
    """Why a request has ended whose choices ended like this: STOP if all did, else LENGTH."""
    return Finish(Reason.STOP if all(r is Reason.STOP for r in reasons) else Reason.LENGTH)

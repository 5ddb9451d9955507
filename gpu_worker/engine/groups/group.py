"""Requests with several sequences: what they have in common, and choices that are streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from penstock.shared.protocol import Part, Reason

from ..output_state import Output
from ..request_validator import RequestValidator
from ..requests import Finish, Update
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from ..step_output import StepOutput

__all__ = ["Choices", "Group", "part_of", "replay", "summary"]


class Group(ABC):
    """One request's sequences, and what they give together.

    ``members`` are those the scheduler knows. It is the very object that they have as their
    ``siblings``, so that the scheduler sees who they are, too. Every member is taken out of it as
    it ends, and the group is over when it is empty.

    Args:
        scheduler: gets the sequences.
        validator: refuses what can never fit.
        sequence: the first of them; its ``siblings`` are set.
    """

    def __init__(
        self, scheduler: Scheduler, validator: RequestValidator, sequence: Sequence
    ) -> None:
        self.members: dict[Sequence, None] = {}
        self.first = sequence
        self._scheduler = scheduler
        self._validator = validator
        sequence.siblings = self.members

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return not self.members

    @property
    def num_unpublished(self) -> int:
        """Output tokens that were generated and not published."""
        return 0

    @abstractmethod
    def collect(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """What a step gave for one of the members.

        Args:
            sequence: the member.
            token_ids: what was sampled for it.
            output: the step's, with what else was reported of it.

        Returns:
            What is to be published: the request's last update, with ``finish``, if it is over.
        """

    def remove(self) -> None:
        """The request ends here: forget all members."""
        for sequence in list(self.members):
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self.members[sequence]
        self._scheduler.finish(sequence)

    def end(self, finish: Finish) -> Update:
        """Forget all members; the request's last update, without tokens."""
        self.remove()
        first = self.first
        num_prompt, num_cached = first.num_prompt_tokens, first.num_cached_tokens
        update = Update(first.id, 0, (), "", finish, num_prompt, num_cached)
        update.discarded_tokens = self.num_unpublished
        return update


class Choices(Group):
    """``n`` outputs of one prompt, each published as it comes.

    The first computes the prompt; the others are let go when that is done, share its blocks and
    compute only the prompt's last token, for logits of their own.

    Args:
        outputs: the choices that go on, by sequence, in order; at least one.
        reasons: why those have ended that another worker brought to their end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        validator: RequestValidator,
        outputs: dict[Sequence, Output],
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
        """See :class:`Group`: one update, of this choice."""
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
            update.text += text.flush()
            update.parts = (part_of(update, None),)
            update.finish = finish
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


def replay(output: Output, token_ids: tuple[int, ...]) -> Finish | None:
    """Bring an output to where another worker left it; its text was published with its tokens."""
    for token_id in token_ids:
        update = output.append((token_id,))
        if update.finish is not None:
            return update.finish
    return None

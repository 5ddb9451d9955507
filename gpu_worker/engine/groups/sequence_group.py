"""A request with several sequences: what every kind of group does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from ..output.output_state import OutputState
from ..output.step_output import StepOutput
from ..requests.engine_request import Finish, Update
from ..requests.request_validator import RequestValidator
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence

__all__ = ["SequenceGroup", "replay"]


class SequenceGroup(ABC):
    """One request's sequences and their common answer.

    ``members`` holds the sequences that the scheduler knows. The members have this very object as
    their ``siblings``, so the scheduler sees them, too. A member leaves it as it ends, and the
    group is over when it is empty.

    Args:
        scheduler: gets the sequences.
        validator: refuses what can never fit.
        sequence: the first member; its ``siblings`` are set.
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
        """OutputState tokens that were generated and not published."""
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
            Updates to publish; the last one of a request that is over has ``finish``.
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
        finish = replace(finish, discarded_tokens=self.num_unpublished)
        return Update(first.id, 0, (), "", finish, num_prompt, num_cached)


def replay(output: OutputState, token_ids: tuple[int, ...]) -> Finish | None:
    """Bring an output to where another worker left it; its text was published with its tokens."""
    for token_id in token_ids:
        update = output.append((token_id,))
        if update.finish is not None:
            return update.finish
    return None

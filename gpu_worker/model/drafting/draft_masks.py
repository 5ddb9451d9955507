"""Lets a draft model say only what the form of an output allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ...engine.sequence import Sequence
from ..structured.constraint_state import ConstraintFollower, MatcherPosition
from ..structured.matcher import ConstraintError

__all__ = ["Walks"]


class Walks:
    """Goes with the drafts of one step through the grammars of their sequences.

    Without it, drafts in a form would be guesses at what the model would say if it had none. The
    states themselves stay where they are: drafts may be refused.

    Args:
        sequences: those that have drafts; of a grammar whose masks are quick to make.
    """

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self._places: dict[Sequence, MatcherPosition] = {
            sequence: follower.ahead(sequence.token_ids, sequence.num_prompt_tokens)
            for sequence in sequences
            if isinstance(follower := sequence.constraint, ConstraintFollower)
        }

    def masks(
        self, sequences: Iterable[Sequence], drafts: Mapping[Sequence, list[int]]
    ) -> list[Tensor]:
        """The masks of those that have a grammar, in order; to be called once for each draft.

        Args:
            sequences: that still have drafts.
            drafts: of each what it has been given so far. The last is gone on by here.

        Returns:
            int32 ``[words]`` each; nothing is allowed where nothing is known to follow.
        """
        found = []
        for sequence in sequences:
            place = self._places.get(sequence)
            if place is None:
                continue
            mask = place.empty_mask()
            try:
                place.advance(drafts[sequence][-1:], mask)
            except ConstraintError:
                mask.zero_()
            found.append(mask)
        return found

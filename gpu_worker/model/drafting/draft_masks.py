"""Masks that keep a draft model within the constraints of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ...engine.sequence import Sequence
from ..structured.constraint_state import ConstraintFollower, MatcherPosition
from ..structured.matcher import ConstraintError

__all__ = ["DraftMasks"]


class DraftMasks:
    """Follows the drafts of one step on copies of their sequences' constraint states.

    Without masks a draft model would guess what the target says without a constraint. The states
    themselves do not move, since drafts may be refused.

    Args:
        sequences: those with drafts; their masks are quick to compute.
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
        """The masks of the constrained sequences, in order; call it once for each draft.

        Args:
            sequences: those that get another draft.
            drafts: the drafts of each sequence so far. This call advances by the last one.

        Returns:
            int32 ``[words]`` each. A mask allows nothing where the constraint cannot continue.
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

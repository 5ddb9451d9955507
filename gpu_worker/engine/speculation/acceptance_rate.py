"""How often drafts of one kind were accepted lately."""

from __future__ import annotations

__all__ = ["AcceptanceRate"]

_MEMORY = 0.98
"""Weight of a step's drafts one step later: a window of 50 steps, some two or three paragraphs."""

_PRIOR_WEIGHT = 4.0
"""Drafts for which the prior counts: few enough that a sequence's own outcomes soon decide."""


class AcceptanceRate:
    """The chance that a draft is accepted once all drafts before it were.

    Of drafts that have chances of their own, the factor by which these are to be multiplied.

    It comes from decayed counts of accepted drafts and of first refused drafts. Drafts behind a
    refused one tell nothing.
    """

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._accepted = self._tried = 0.0

    def rate(self, prior: float) -> float:
        """The rate, where ``prior`` stands in for missing experience."""
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._tried + _PRIOR_WEIGHT)

    def fade(self) -> None:
        """Age by one step, so that refused drafts do not rule a source out for ever."""
        self._accepted *= _MEMORY
        self._tried *= _MEMORY

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count a step's verified drafts."""
        self._accepted += num_accepted
        self._tried += num_accepted + (num_accepted < num_drafted)

    def observe_expected(self, expected: float, num_accepted: int) -> None:
        """Count a step's drafts that have chances of their own; the rate is then of these.

        Args:
            expected: the sum of the chances of those that were accepted, and of the first that was
                not, each if all before it are right.
            num_accepted: how many the model agreed with.
        """
        self._accepted += num_accepted
        self._tried += expected

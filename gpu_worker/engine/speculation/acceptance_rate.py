"""How often drafts of one kind were accepted lately."""

from __future__ import annotations

__all__ = ["AcceptanceRate", "expected_tokens", "worthwhile"]

_MEMORY = 0.98
"""Weight of a step's drafts one step later: a window of 50 steps, some two or three paragraphs."""

_PRIOR_WEIGHT = 4.0
"""Drafts for which the prior counts: few enough that a sequence's own outcomes soon decide."""


class AcceptanceRate:
    """The chance that a draft is accepted once all drafts before it were.

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


def expected_tokens(rate: float, length: int) -> float:
    """Tokens that ``length`` drafts add on average: ``rate + rate**2 + ... + rate**length``."""
    if rate >= 1.0:
        return float(length)
    return rate * (1.0 - rate**length) / (1.0 - rate)


def worthwhile(rate: float, price: float, most: int) -> int:
    """How many drafts, up to ``most``, are each accepted with probability ``price`` or more."""
    length, probability = 0, rate
    while length < most and probability >= price:
        length, probability = length + 1, probability * rate
    return length

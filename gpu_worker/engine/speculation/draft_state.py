"""What is known of one sequence's drafts: where they come from, how often they were right."""

from __future__ import annotations

from enum import StrEnum

from .ngram import NgramIndex

__all__ = ["Drafting", "Source"]

_MEMORY = 0.96
"""What a step's drafts weigh after one more step with drafts: a window of some 25 steps."""

_PRIOR = 4.0
"""How many drafts of experience the worker's mean counts for, in a sequence's own rate."""


_LONG_AGO = 1000
"""Steps since the draft model was asked, of a sequence for which it never was."""


class Source(StrEnum):
    """Where drafts come from. Text matches are told apart by length: longer ones are surer."""

    DRAFT = "draft"
    NGRAM_SHORT = "ngram_short"
    NGRAM_MEDIUM = "ngram_medium"
    NGRAM_LONG = "ngram_long"

    @classmethod
    def of_match(cls, length: int) -> Source:
        """The source of drafts that continue a match of ``length`` tokens."""
        if length < 4:
            return cls.NGRAM_SHORT
        return cls.NGRAM_MEDIUM if length < 10 else cls.NGRAM_LONG

    @property
    def is_text(self) -> bool:
        """Whether it is the sequence's own text."""
        return self is not Source.DRAFT

    @property
    def prior(self) -> float:
        """Chance that a draft is accepted, before anything was seen."""
        return {
            Source.DRAFT: 0.6,
            Source.NGRAM_SHORT: 0.45,
            Source.NGRAM_MEDIUM: 0.6,
            Source.NGRAM_LONG: 0.8,
        }[self]


class Drafting:
    """The drafting side of one sequence.

    An acceptance rate here is the chance that a draft is accepted once all before it were. It is
    taken from a window: decayed counts of drafts accepted and of first drafts refused (those
    behind a refused one say nothing).

    Attributes:
        asked: number of the last step in which the draft model was asked for drafts of it.
        missed: how many steps lay between that and the one before.
    """

    __slots__ = ("_accepted", "_index", "_refused", "asked", "missed")

    def __init__(self) -> None:
        self.asked, self.missed = -_LONG_AGO, 0
        self._index: NgramIndex | None = None
        self._accepted: dict[Source, float] = {}
        self._refused: dict[Source, float] = {}

    def read(self, token_ids: list[int], most: int) -> int:
        """See :meth:`NgramIndex.read`; the index is made at the first call."""
        if self._index is None:
            self._index = NgramIndex()
        return self._index.read(token_ids, most)

    def look_up(self, token_ids: list[int], most: int) -> tuple[tuple[int, ...], int]:
        """See :meth:`NgramIndex.propose`; nothing as long as not all of the text was read."""
        if self._index is None or self._index.num_missing(token_ids):
            return (), 0
        return self._index.propose(token_ids, most)

    def ask(self, step: int) -> None:
        """The draft model is asked in this step."""
        self.missed, self.asked = step - self.asked - 1, step

    def rate(self, source: Source, mean: float) -> float:
        """Acceptance rate of this sequence's drafts from ``source``; ``mean`` is the worker's."""
        accepted = self._accepted.get(source, 0.0)
        tried = accepted + self._refused.get(source, 0.0)
        return (accepted + _PRIOR * mean) / (tried + _PRIOR)

    def tried(self, source: Source) -> float:
        """Drafts of late from ``source`` of which the outcome is known."""
        return self._accepted.get(source, 0.0) + self._refused.get(source, 0.0)

    def observe(self, source: Source, num_drafted: int, num_accepted: int) -> None:
        """Drafts were verified."""
        refused = num_accepted < num_drafted
        self._accepted[source] = _MEMORY * self._accepted.get(source, 0.0) + num_accepted
        self._refused[source] = _MEMORY * self._refused.get(source, 0.0) + refused

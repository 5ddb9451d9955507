"""The drafting state of one sequence: its n-gram index and the acceptance of its drafts."""

from __future__ import annotations

from ..plan import DraftSource
from .acceptance_rate import AcceptanceRate
from .ngram import NgramIndex

__all__ = ["DraftState"]


class DraftState:
    """The drafting state of one sequence.

    Attributes:
        num_read: tokens of the sequence when the draft model was last asked for drafts; 0: never.
    """

    __slots__ = ("_index", "_rates", "num_read")

    def __init__(self) -> None:
        self.num_read = 0
        self._index: NgramIndex | None = None
        self._rates: dict[DraftSource, AcceptanceRate] = {}

    def read(self, token_ids: list[int], most: int) -> int:
        """See :meth:`NgramIndex.read`; the first call makes the index."""
        if self._index is None:
            self._index = NgramIndex()
        return self._index.read(token_ids, most)

    def look_up(self, token_ids: list[int], most: int) -> tuple[tuple[int, ...], int]:
        """See :meth:`NgramIndex.propose`; nothing until the index has read the whole text."""
        if self._index is None or self._index.num_missing(token_ids):
            return (), 0
        return self._index.propose(token_ids, most)

    def rate(self, source: DraftSource, prior: float) -> float:
        """Acceptance rate of this sequence's drafts from ``source``; call it once a step."""
        rate = self._rates.get(source)
        if rate is None:
            return prior
        rate.fade()
        return rate.rate(prior)

    def observe(self, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        """Count a step's verified drafts."""
        rate = self._rates.get(source)
        if rate is None:
            rate = self._rates[source] = AcceptanceRate()
        rate.observe(num_drafted, num_accepted)

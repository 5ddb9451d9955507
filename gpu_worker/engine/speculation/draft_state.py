"""The drafting state of one sequence: its n-gram index and the acceptance of its drafts."""

from __future__ import annotations

from ..plan import DraftSource
from .acceptance_rate import AcceptanceRate
from .ngram import NgramIndex

__all__ = ["DraftState"]


class DraftState:
    """The drafting state of one sequence.

    Args:
        room: most tokens of prompt and output; 0: it has no drafts.
        has_texts: whether it may have drafts from texts.
        asks_model: whether it may have the draft model's.

    Attributes:
        room, has_texts, asks_model: the same.
        num_read: tokens of the sequence when the draft model was last asked for drafts; 0: never.
        num_learned: its first tokens, so far as the memory of outputs has taken them in or has
            left them out for good.
        chances: of the drafts that the memory gave last, see :class:`.TextMemory`.
    """

    __slots__ = (
        "_index", "_rates", "asks_model", "chances", "has_texts", "num_learned", "num_read", "room",
    )  # fmt: skip

    def __init__(self, *, room: int = 0, has_texts: bool = True, asks_model: bool = True) -> None:
        self.room = room
        self.has_texts = has_texts
        self.asks_model = asks_model
        self.num_read = 0
        self.num_learned = 0
        self.chances: list[float] = []
        self._index: NgramIndex | None = None
        self._rates: dict[DraftSource, AcceptanceRate] = {}

    def read(self, token_ids: list[int], most: int) -> int:
        """See :meth:`NgramIndex.read`; the first call makes the index."""
        if self._index is None:
            self._index = NgramIndex()
        return self._index.read(token_ids, most)

    def look_up(self, token_ids: list[int], most: int) -> tuple[tuple[int, ...], int]:
        """See :meth:`NgramIndex.propose`; nothing until the index has read the whole text."""
        index = self._index
        if index is None or index.num_missing(token_ids):
            return (), 0
        return index.propose(token_ids, most)

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
        if source is DraftSource.MEMORY:
            rate.observe_expected(self.expected(num_drafted, num_accepted), num_accepted)
        else:
            rate.observe(num_drafted, num_accepted)

    def expected(self, num_drafted: int, num_accepted: int) -> float:
        """What :meth:`.AcceptanceRate.observe_expected` takes, of the memory's last drafts."""
        before, expected = 1.0, 0.0
        for chance in self.chances[: min(num_drafted, num_accepted + 1)]:
            expected += chance / before
            before = chance
        return expected

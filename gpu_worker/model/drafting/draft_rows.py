"""A draft's place in a sequence, as the sampler sees it: the sequence, were the draft accepted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeVar

from penstock.shared.protocol.sampling_options import SamplingOptions

from ...engine.sequence import Sequence

__all__ = ["DraftRow", "DraftRows", "SampledRow", "base_of"]


class DraftRow:
    """What the sampler reads of a sequence, ``offset`` accepted drafts further on.

    Attributes:
        sequence: the sequence.
        offset: how many drafts lie between its last token and the row, at least 1.
        drafts: its drafts, of which the first ``offset`` count; shared with its other rows.
        options: the sequence's.
        seed: the sequence's.
        choice: the sequence's.
        num_candidates: 0, since beams have no drafts.
    """

    __slots__ = ("choice", "drafts", "num_candidates", "offset", "options", "seed", "sequence")

    def __init__(self, sequence: Sequence, offset: int, drafts: list[int]) -> None:
        self.sequence = sequence
        self.offset = offset
        self.drafts = drafts
        self.options: SamplingOptions = sequence.options
        self.seed = sequence.seed
        self.choice = sequence.choice
        self.num_candidates = 0

    @property
    def num_prompt_tokens(self) -> int:
        """The sequence's."""
        return self.sequence.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Index of the token that the row gives."""
        return self.sequence.num_output_tokens + self.offset

    @property
    def token_ids(self) -> list[int]:
        """The sequence's tokens and the drafts before the row, as a new list."""
        return self.sequence.token_ids + self.drafts[: self.offset]


SampledRow = Sequence | DraftRow


_Row = TypeVar("_Row")


def base_of(row: _Row) -> _Row | Sequence:
    """The sequence that a draft's row belongs to; any other row is its own."""
    return row.sequence if isinstance(row, DraftRow) else row


class DraftRows:
    """Makes rows, and gives the same ones again: the sampler keeps what it has set up for them."""

    def __init__(self) -> None:
        self._known: dict[Sequence, tuple[list[int], list[SampledRow]]] = {}

    def of(self, sequence: Sequence, drafts: Seq[int]) -> list[SampledRow]:
        """The rows of a sequence with these drafts: one for each, and the one behind the last."""
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = ([], [sequence])
        held, rows = known
        held[:] = drafts
        while len(rows) <= len(drafts):
            rows.append(DraftRow(sequence, len(rows), held))
        return rows[: len(drafts) + 1]

    def keep(self, sequences: Seq[Sequence]) -> None:
        """Forget all other sequences, once they are the most."""
        if len(self._known) > 2 * len(sequences) + 16:
            alive = set(sequences)
            self._known = {s: rows for s, rows in self._known.items() if s in alive}

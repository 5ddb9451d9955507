"""Verifies the drafts of a step, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.sequence import Sequence
from ..sampling.sampler import Sampler, SamplingBatch
from .acceptance import reject, take_typical
from .draft_rows import SampledRow
from .drafters import Proposal

__all__ = ["Verifier"]

_SLICE_ELEMENTS = 1 << 22
"""Probabilities in one table: 32 MiB, and there are up to six tables."""


class _Place(NamedTuple):
    row: int
    draft: int
    proposed: Tensor | None
    """Float64 ``[V]``, from which the draft was drawn; None if it was certain."""


class Verifier:
    """Chooses the tokens of a step with drafts.

    Coupled verification takes the tokens that the sampler has drawn. Rejection sampling and typical
    acceptance need whole distributions, in float64. The verifier computes them only for sampled
    rows that have a draft and ask for it, a few rows at a time.

    Args:
        sampler: the one that drew the tokens.
        eos_token_ids: ids that end an output, unless its request ignores them.
        rejection: verify by rejection sampling, see :mod:`.acceptance`.
        slice_elements: most elements of a table, if one row has no more.
    """

    def __init__(
        self,
        sampler: Sampler,
        eos_token_ids: frozenset[int],
        *,
        rejection: bool,
        slice_elements: int = _SLICE_ELEMENTS,
    ) -> None:
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._rejection = rejection
        self._slice_elements = slice_elements
        self._batches: list[SamplingBatch] = []

    def choose(
        self,
        logits: Tensor,
        chosen: Tensor,
        rows: Seq[SampledRow],
        proposals: Mapping[Sequence, Proposal],
        masks: Seq[Tensor],
    ) -> Tensor:
        """Choose the token of each row, given the one that was drawn.

        Args:
            logits: ``[N, V]``; not changed.
            chosen: int64 ``[N]``, drawn from the target; changed in place.
            rows: N; the rows of a sequence's drafts follow its own.
            proposals: the drafts of the sequences that have some.
            masks: what may follow in each row with a constraint, in order.

        Returns:
            int64 ``[N]``: ``chosen``.
        """
        places = self._places(rows, proposals)
        if not places:
            return chosen
        coming = iter(masks)
        forms = {i: next(coming) for i, row in enumerate(rows) if row.options.constraint}
        size = max(1, self._slice_elements // logits.shape[1])
        parts = [places[begin : begin + size] for begin in range(0, len(places), size)]
        before, self._batches = self._batches, []
        for number, part in enumerate(parts):
            mine = [rows[place.row] for place in part]
            batch = SamplingBatch.from_sequences(
                mine,
                logits.device,
                before[number] if number < len(before) else None,
                eos_token_ids=self._eos_token_ids,
            )
            self._batches.append(batch)
            index = torch.tensor([place.row for place in part], device=logits.device)
            allowed = [forms[place.row] for place in part if place.row in forms]
            likely = self._sampler.probabilities(logits[index], batch, allowed)
            chosen[index] = self._taken(chosen[index], mine, part, likely)
        return chosen

    def _places(
        self, rows: Seq[SampledRow], proposals: Mapping[Sequence, Proposal]
    ) -> list[_Place]:
        """The rows to examine. In a greedy row the drawn token is right whatever the draft is."""
        found = []
        for begin, row in enumerate(rows):
            proposal = proposals.get(row) if isinstance(row, Sequence) else None
            options = row.options
            if proposal is None or options.temperature <= 0:
                continue
            if self._rejection or options.accept_threshold:
                likely = proposal.probabilities
                found += [
                    _Place(begin + offset, draft, None if likely is None else likely[offset])
                    for offset, draft in enumerate(proposal.token_ids)
                ]
        return found

    def _taken(
        self, chosen: Tensor, rows: Seq[SampledRow], places: Seq[_Place], likely: Tensor
    ) -> Tensor:
        drafts = [place.draft for place in places]
        if self._rejection:
            chosen = reject(chosen, rows, drafts, likely, _proposed(places, likely))
        if any(row.options.accept_threshold for row in rows):
            chosen = take_typical(chosen, rows, drafts, likely)
        return chosen


def _proposed(places: Seq[_Place], likely: Tensor) -> Tensor:
    """Float64 ``[R, V]``, from which the drafts were drawn."""
    table = torch.zeros_like(likely)
    for row, place in zip(table, places, strict=True):
        if place.proposed is None:
            row[place.draft] = 1.0
        else:
            row.copy_(place.proposed)
    return table

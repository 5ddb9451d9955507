"""What each span of a plan gets of the tokens that a step's rows were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from penstock.shared.protocol.events import TokenLogprobs

from ...engine.plan import Plan
from ...engine.sequence import Sequence
from .acceptance import agreed
from .draft_rows import SampledRow

__all__ = ["candidates_of_sequences", "reports_of_spans", "tokens_of_spans"]

Candidates = tuple[tuple[int, float], ...]
"""The most likely next tokens of a beam, with the logarithms of their probabilities."""


def tokens_of_spans(
    plan: Plan, sampled: list[int], drafts: Mapping[Sequence, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each span.

    Args:
        plan: the step's.
        sampled: the token of each row.
        drafts: of the sequences that have some; a span has a row more for each.
    """
    if not drafts:
        if len(sampled) == len(plan.spans):
            return tuple(zip(sampled, strict=True))
        tokens = iter(sampled)
        return tuple([(next(tokens),) if span.samples else () for span in plan.spans])
    token_ids = []
    for span, begin in zip(plan.spans, _first_rows(plan, drafts), strict=True):
        proposed = drafts.get(span.sequence, ())
        chosen = sampled[begin : begin + len(proposed) + 1]
        token_ids.append(agreed(proposed, chosen) if span.samples else ())
    return tuple(token_ids)


def _first_rows(plan: Plan, drafts: Mapping[Sequence, tuple[int, ...]]) -> Iterator[int]:
    """The first row of each span, or of the next that samples."""
    begin = 0
    for span in plan.spans:
        yield begin
        if span.samples:
            begin += len(drafts.get(span.sequence, ())) + 1


def reports_of_spans(
    plan: Plan,
    by_row: Mapping[int, TokenLogprobs],
    drafts: Mapping[Sequence, tuple[int, ...]],
    token_ids: Seq[tuple[int, ...]],
) -> dict[Sequence, tuple[TokenLogprobs, ...]]:
    """The reports of the tokens that were taken."""
    return {
        span.sequence: tuple(by_row[begin + offset] for offset in range(len(ids)))
        for span, begin, ids in zip(plan.spans, _first_rows(plan, drafts), token_ids, strict=True)
        if ids and begin in by_row
    }


def candidates_of_sequences(
    rows: Seq[SampledRow], by_row: Mapping[int, Candidates]
) -> dict[Sequence, Candidates]:
    """What was found for rows of sequences without drafts, by sequence."""
    return {
        row: by_row[i] for i, row in enumerate(rows) if i in by_row and isinstance(row, Sequence)
    }

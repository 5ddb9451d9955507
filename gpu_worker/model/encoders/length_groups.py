"""Which rows are computed together: rows of like length, so that little padding is computed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["length_groups"]


def length_groups(
    lengths: Sequence[int], max_tokens: int, pass_tokens: int = 32
) -> list[list[int]]:
    """Divide rows into groups that are padded to their longest and computed in one pass each.

    The rows are sorted by length and cut where that costs least: a pass costs its tokens, padding
    included, and a fixed part. That is a shortest path over the distinct lengths, whose steps are
    groups. A row that is longer than the bound is a group of its own.

    Args:
        lengths: tokens of each row.
        max_tokens: of one pass, padding included.
        pass_tokens: what the fixed part of a pass costs, in tokens.

    Returns:
        Indexes into ``lengths``, group by group, long rows first; every row is in one group.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups = []
    start = 0
    for count in _cuts([lengths[index] for index in order], pass_tokens):
        longest = lengths[order[start]]
        most = max(1, max_tokens // max(1, longest))
        end = start + count
        while start < end:
            groups.append(order[start : min(start + most, end)])
            start += len(groups[-1])
    return groups


def _cuts(descending: Sequence[int], pass_tokens: int) -> list[int]:
    """How many rows each group has, in order."""
    borders = [
        index
        for index, length in enumerate(descending)
        if index == 0 or length != descending[index - 1]
    ]
    total = len(descending)
    # best[k]: what the rows from borders[k] on cost at least, and where their first group ends.
    best: list[tuple[int, int]] = [(0, 0)] * len(borders) + [(0, 0)]
    ends = [*borders[1:], total]
    for first in range(len(borders) - 1, -1, -1):
        begin = borders[first]
        length = descending[begin]
        best[first] = min(
            (pass_tokens + length * (end - begin) + best[last + 1][0], last)
            for last, end in enumerate(ends[first:], start=first)
        )
    counts, first = [], 0
    while first < len(borders):
        last = best[first][1]
        counts.append(ends[last] - borders[first])
        first = last + 1
    return counts

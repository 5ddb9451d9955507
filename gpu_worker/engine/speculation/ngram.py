"""Drafts from what a sequence has said before: the longest suffix that came earlier, and after it.

Prompt lookup (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding), over prompt and
output. It costs no model and is right wherever text repeats: code that is edited, a table, a
summary that quotes.
"""

from __future__ import annotations

__all__ = ["NgramIndex"]

_CANDIDATES = 8
"""Earlier places that are compared, most recent first."""

_LONGEST = 32
"""Tokens compared at most. A longer match says no more than this one does."""


class NgramIndex:
    """Where each pair of neighbouring tokens of one sequence has come before.

    Grows with the sequence, a dictionary entry for each token; nothing is ever scanned again. A
    look-up follows a few earlier places of the last pair and compares backwards from there: time
    in proportion to the length of the match. To spread a long text over several steps, call
    :meth:`read` with a bound in each, and propose once nothing is missing.
    """

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        # Position p -> the place before p at which the pair ending in p ended; -1: none.
        self._before: list[int] = [-1]

    def num_missing(self, token_ids: list[int]) -> int:
        """How many tokens at the end are not in it yet."""
        return len(token_ids) - len(self._before)

    def read(self, token_ids: list[int], most: int) -> int:
        """Take in up to ``most`` more tokens; how many it were."""
        last, before = self._last, self._before
        begin = len(before)
        stop = min(len(token_ids), begin + most)
        for position in range(begin, stop):
            pair = token_ids[position - 1] << 32 | token_ids[position]
            before.append(last.get(pair, -1))
            last[pair] = position
        return max(0, stop - begin)

    def propose(self, token_ids: list[int], most: int) -> tuple[tuple[int, ...], int]:
        """Up to ``most`` tokens that followed the last ones when they came before.

        What is missing is read first.

        Args:
            token_ids: the same list at each call, with tokens added at its end.
            most: at least 1.

        Returns:
            The drafts, and the length of the match they continue, at least 2; nothing and 0 where
            the last two tokens have not come before.
        """
        end = len(token_ids) - 1
        if len(self._before) <= end:
            self.read(token_ids, len(token_ids))
        place, longest, found = self._before[end] if end else -1, 0, -1
        if place < 0:
            return (), 0
        for _ in range(_CANDIDATES):
            if place < 0:
                break
            length = _common_suffix(token_ids, place, end)
            if length > longest:
                longest, found = length, place
            if length == _LONGEST:
                break
            place = self._before[place]
        if found < 0:
            return (), 0
        drafts = token_ids[found + 1 : found + 1 + most]
        # The match may reach up to the end: then what repeats is drafted round and round.
        period = len(drafts)
        while len(drafts) < most:
            drafts.append(drafts[-period])
        return tuple(drafts), longest


def _common_suffix(token_ids: list[int], place: int, end: int) -> int:
    """How many tokens ending at ``place`` are those ending at ``end``."""
    length, most = 0, min(place + 1, _LONGEST)
    while length < most and token_ids[place - length] == token_ids[end - length]:
        length += 1
    return length

"""Drafts from what all outputs of a worker have said: what mostly followed the last tokens.

Answers of one service resemble each other, in their phrases, in the keys of their JSON, in the code
that they quote. A table remembers, for each context of 2, 4 and 8 tokens, the token that mostly
came next, and how often. The longest context that is known speaks, and a chain of its answers is a
draft, each with a chance of its own. This is a text's suffix tree (SuffixDecoding: Oliaro et al.,
2024, https://arxiv.org/abs/2411.04975) in the form that CPUs give to the histories of branches:
tables of fixed size, tagged, for contexts of geometric lengths (Seznec and Michaud, 2006, "A case
for (partially) tagged geometric history length branch prediction").
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["TextMemory"]

_CONTEXTS = (2, 4, 8)
"""Tokens of a context. Further lengths between these or beyond gain next to nothing."""

_LONGEST_FIRST = _CONTEXTS[::-1]

_NUM_ENTRIES = 1 << 20
"""8 MiB: the contexts of some 300,000 tokens."""

_MOST_SEEN = 64
"""Once a context came so often, its counts are halved, so that they follow what is said now."""

_SEEN, _HIT = 0x0100, 0x0101
"""What they add to an entry: the context was seen once more, with another token or with its own."""

_CHANGED = 0x0301
"""Counts of a context that gets another token: a hit of three, as what varies goes on to vary."""

_PRIOR_HITS, _PRIOR_SEEN = 0.3, 1.0
"""Added to the counts for the chance of a draft. So what came once has a chance of 0.65, and was
right so often in 60,000 tokens of a small model."""


class TextMemory:
    """Which token mostly follows a context.

    An entry has 64 bits. The upper 32 are the token, and the next 16 are a tag of the context. Then
    come two counts of 8 bits: how often the context was seen since it has this token, and how often
    that followed. A context has one place. Where another context has it, the counts there sink,
    and the place is taken in the end: what is said often stays, and what was said once goes first.
    A token that follows less than half of the time gives way to the next one that does.

    Nothing depends on a draft being right, so tags that collide are no harm.

    Args:
        num_entries: of the table, a power of two; 8 bytes each.
    """

    __slots__ = ("_mask", "_table")

    def __init__(self, num_entries: int = _NUM_ENTRIES) -> None:
        if num_entries < 1 or num_entries & (num_entries - 1):
            raise ValueError(f"{num_entries} entries are no power of two")
        self._table = array("Q", bytes(8 * num_entries))
        self._mask = num_entries - 1

    def learn(self, token_ids: Sequence[int], begin: int, stop: int, salt: bytes = b"") -> None:
        """Take in tokens and the contexts before them: three entries each, some 2 us.

        Args:
            token_ids: a sequence's, each from 0 to 2**32 - 1.
            begin: the first place whose token is taken in; what lies before is context alone.
            stop: behind the last.
            salt: what was learned with another salt is never proposed.
        """
        table, mask = self._table, self._mask
        for place in range(begin, stop):
            token = token_ids[place] << 16
            for length in _CONTEXTS:
                if length > place:
                    break
                key = hash((salt, *token_ids[place - length : place]))
                slot, known = key & mask, token | key >> 44 & 0xFFFF
                entry = table[slot]
                held = entry >> 16
                if held == known:
                    entry += _HIT
                    if entry >> 8 & 0xFF >= _MOST_SEEN:
                        entry = held << 16 | entry >> 1 & 0x7F7F
                elif (held ^ known) & 0xFFFF:  # another context's
                    entry = entry - _HIT if entry & 0xFE else known << 16 | _HIT
                elif (entry & 0xFF) * 2 > (entry >> 8 & 0xFF):
                    entry += _SEEN
                else:  # it was not said half of the time
                    entry = known << 16 | _CHANGED
                table[slot] = entry

    def propose(
        self, token_ids: Sequence[int], most: int, least: float, salt: bytes = b""
    ) -> tuple[tuple[int, ...], list[float]]:
        """Up to ``most`` tokens that may come next.

        Args:
            token_ids: a sequence's.
            most: at least 1.
            least: a draft with a smaller chance is none, nor are those behind it.
            salt: as in :meth:`learn`.

        Returns:
            The drafts, and the chance of each that it and all before it are right.
        """
        table, mask = self._table, self._mask
        context = list(token_ids[-_LONGEST_FIRST[0] :])
        begin = len(context)
        chance = 1.0
        chances: list[float] = []
        while len(chances) < most:
            for length in _LONGEST_FIRST:
                if length > len(context):
                    continue
                key = hash((salt, *context[-length:]))
                entry = table[key & mask]
                if entry and entry >> 16 & 0xFFFF == key >> 44 & 0xFFFF:
                    break
            else:
                break
            chance *= ((entry & 0xFF) + _PRIOR_HITS) / ((entry >> 8 & 0xFF) + _PRIOR_SEEN)
            if chance < least:
                break
            chances.append(chance)
            context.append(entry >> 32)
        return tuple(context[begin:]), chances

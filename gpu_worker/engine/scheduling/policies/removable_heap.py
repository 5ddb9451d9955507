"""A heap from whose middle items can leave."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["RemovableHeap"]

_Item = TypeVar("_Item", bound=Hashable)


class RemovableHeap(Generic[_Item]):
    """Items by key, the smallest first; of equal keys the one that was put first.

    :meth:`put`, :meth:`remove` and :meth:`first` take amortised O(log n). An entry removed from the
    middle stays in the array until it comes to the top, or until half of the array was removed.
    """

    __slots__ = ("_array", "_entries", "_puts")

    def __init__(self) -> None:
        # An entry of the array counts if it is its item's present one. No two have equal numbers,
        # so items are never compared.
        self._array: list[tuple[float, int, _Item]] = []
        self._entries: dict[_Item, tuple[float, int, _Item]] = {}
        self._puts = 0

    def put(self, item: _Item, key: float) -> None:
        """Add an item, or give it another key."""
        self._puts += 1
        entry = self._entries[item] = (key, self._puts, item)
        heapq.heappush(self._array, entry)
        self._shrink()

    def remove(self, item: _Item) -> None:
        """Take an item out.

        Raises:
            KeyError: it is not there.
        """
        del self._entries[item]
        self._shrink()

    def first(self) -> _Item | None:
        """The item with the smallest key; None if there is none."""
        array, entries = self._array, self._entries
        while array:
            entry = array[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(array)
        return None

    def key(self, item: _Item) -> float:
        """The key of an item that is there."""
        return self._entries[item][0]

    def _shrink(self) -> None:
        if len(self._array) > 2 * len(self._entries) + 16:
            self._array = list(self._entries.values())
            heapq.heapify(self._array)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._entries)

"""Items that wait to be computed together, and which of them are the next batch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.states import Lane

from .window import Window

__all__ = ["Batch", "BatchQueue", "Item"]

_OVERTAKE_S = 1.0
"""How much later an item of the next more urgent lane may come and still go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request, as a batcher sees it.

    Attributes:
        run: the request's name in the engine process.
        payload: what the model maps to one result.
        lane: urgency.
        cost: its share of a batch, in units of the model's own; 1 for items that are all alike.
        key: items share a batch only if their keys are equal.
        arrival: when it was accepted, in monotonic seconds.
        came: when it came to this worker, by the same clock.
        deadline: when it expires, by the same clock.
        alone: it may have crashed a worker, and shares its batch with none.
    """

    run: str
    payload: Any
    lane: Lane = Lane.NORMAL
    cost: int = 1
    key: Hashable = None
    arrival: float = 0.0
    came: float = 0.0
    deadline: float = float("inf")
    alone: bool = False

    @property
    def turn(self) -> float:
        """Items go in the order of this number: by lane, and by time within a lane.

        A lane counts as a head start of a second, so that no lane waits for another for ever.
        """
        return self.arrival + self.lane.rank * _OVERTAKE_S


@dataclass(frozen=True, slots=True)
class Batch:
    """Items to be computed together; at least one."""

    items: tuple[Item, ...]

    @property
    def cost(self) -> int:
        """Sum of the items' costs."""
        return sum(item.cost for item in self.items)


class BatchQueue:
    """Waiting items in groups by key.

    Args:
        max_batch: items of a batch at most.
        max_cost: sum of their costs at most; an item that costs more is a batch by itself. None:
            no bound.
        window: says how long a batch that is not full waits for more.
    """

    def __init__(self, max_batch: int, max_cost: int | None, window: Window) -> None:
        self._max_batch = max_batch
        self._max_cost = max_cost
        self._window = window
        self._groups: dict[Hashable, list[Item]] = {}  # by key, each in order of turns
        self._suspects: list[Item] = []
        self._by_run: dict[str, Item] = {}
        self._suspect_is_next = False

    def __len__(self) -> int:
        return len(self._by_run)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._by_run.values())

    def add(self, item: Item) -> None:
        """Let an item wait. Its run must not be waiting yet."""
        assert item.run not in self._by_run
        self._by_run[item.run] = item
        self._window.arrived(item.arrival)
        if item.alone:
            self._suspects.append(item)
        else:
            group = self._groups.setdefault(item.key, [])
            insort(group, item, key=lambda waiting: waiting.turn)

    def drop(self, run: str) -> bool:
        """Forget an item; False if it does not wait."""
        item = self._by_run.pop(run, None)
        if item is None:
            return False
        if item.alone:
            self._suspects.remove(item)
        else:
            self._remove(item)
        return True

    def drop_expired(self, now: float) -> int:
        """Forget items whose time is over, and which Redis ends; returns how many."""
        expired = [item.run for item in self if item.deadline <= now]
        for run in expired:
            self.drop(run)
        return len(expired)

    @property
    def suspect_is_next(self) -> bool:
        """Whether the next batch is that of a suspect."""
        return bool(self._suspects) and (self._suspect_is_next or not self._groups)

    def schedule(self, now: float) -> Batch | None:
        """Take the next batch; None while none is due, see :meth:`next_due`.

        Of the groups that are due, the one whose first item has the earliest turn. A suspect goes
        by itself, after a batch of those that wait beside it: if it ends this process, they are
        not blamed for it.
        """
        if self.suspect_is_next:
            self._suspect_is_next = False
            suspect = self._suspects.pop(0)
            del self._by_run[suspect.run]
            return Batch((suspect,))
        due = [group for group in self._groups.values() if self._due_at(group) <= now]
        if not due:
            return None
        group = min(due, key=lambda group: group[0].turn)
        batch = Batch(tuple(group[: self._fitting(group)]))
        for item in batch.items:
            self.drop(item.run)
        self._suspect_is_next = bool(self._suspects)
        return batch

    def next_due(self) -> float | None:
        """When :meth:`schedule` gives a batch if nothing else comes; None: not before that."""
        if self.suspect_is_next:
            return float("-inf")
        return min(map(self._due_at, self._groups.values()), default=None)

    def _due_at(self, items: list[Item]) -> float:
        """When a group is to be computed: at once if it fills a batch, else after its window."""
        fitting = self._fitting(items)
        if fitting < len(items) or fitting == self._max_batch:
            return float("-inf")
        if self._suspects:  # it does not wait for what may end this process
            return float("-inf")
        cost = sum(item.cost for item in items)
        if self._max_cost is not None and cost >= self._max_cost:
            return float("-inf")
        first = min(item.arrival for item in items)
        newest = max(item.came for item in items)
        return self._window.ends_at(len(items), cost, first, newest)

    def _fitting(self, items: list[Item]) -> int:
        """How many of the first items fit into one batch; at least one."""
        most = min(len(items), self._max_batch)
        if self._max_cost is None:
            return most
        cost = 0
        for count, item in enumerate(items[:most]):
            cost += item.cost
            if count and cost > self._max_cost:
                return count
        return most

    def _remove(self, item: Item) -> None:
        group = self._groups[item.key]
        group.remove(item)
        if not group:
            del self._groups[item.key]

    def check_integrity(self) -> None:
        """Check that each item waits in exactly one place, and in order.

        Raises:
            IntegrityError: it does not.
        """
        grouped = [item for group in self._groups.values() for item in group]
        waiting = [item.run for item in (*grouped, *self._suspects)]
        if sorted(waiting) != sorted(self._by_run):
            raise IntegrityError("items wait in other places than their table says")
        for key, group in self._groups.items():
            turns = [item.turn for item in group]
            if not turns or turns != sorted(turns):
                raise IntegrityError(f"the group {key!r} is empty or out of order")
            if any(item.key != key or item.alone for item in group):
                raise IntegrityError(f"the group {key!r} holds an item of another key")

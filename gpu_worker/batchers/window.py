"""How long a batch that is not full waits for more items.

A batch of cost c is taken to last a + b * c, with a and b learned from the batches that ran. To
wait for one more item spares it a batch of its own, and costs the n items that wait some time. With
w the usual gap between two arrivals, the sum of all latencies is

* run now: n * (a + b*c) for those that wait. The newcomer waits for the rest of that batch,
  a + b*c - w, and then for its own, a + b*c/n;
* wait: n * (w + a + b*c + b*c/n) for those that wait, and a + b*c + b*c/n for the newcomer.

The difference is a - (n + 1) * w - b*c: while it is positive, waiting pays. Real gaps scatter
around w, so the batch waits no longer than could have paid: (a - b*c) / (n + 1). This is the ski
rental rule: rent until the rent equals the price, and pay at most twice the optimum (Karlin,
Manasse, Rudolph and Sleator, 1988).
"""

from __future__ import annotations

from ..engine.scheduling.cost_fit import CostFit

__all__ = ["Window"]

_PACE = 0.1
"""How fast the usual gap follows the gaps: some ten arrivals."""

_TICK_S = 1e-7
"""What lasts less than a tick of the clock seems to last nothing, which no cost fits."""

_LONG_GAPS = 20.0
"""A gap counts as at most so many usual ones: a pause is not a rate."""


class Window:
    """How long to wait.

    Args:
        max_wait_s: no item waits longer for others, in seconds from its acceptance.
        adaptive: wait only while it pays; else always so long, unless the batch is full.
    """

    def __init__(self, max_wait_s: float, *, adaptive: bool = True) -> None:
        self._max_wait_s = max_wait_s
        self._adaptive = adaptive
        self._fit = CostFit((1.0, 1.0))
        self._gap_s: float | None = None
        self._last_arrival: float | None = None

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds of a batch, and of each unit of cost in it, as learned."""
        each_batch, each_unit = self._fit.costs
        return each_batch, each_unit

    @property
    def first_wait_s(self) -> float:
        """How long an item of cost 1 waits now, if nothing else comes."""
        return self.ends_at(1, 1, 0.0, 0.0)

    def arrived(self, at: float) -> None:
        """An item was accepted at this time, in monotonic seconds; perhaps before an earlier one.

        Queues of several lanes and tenants are read in turn, so times are not quite in order.
        """
        last = self._last_arrival
        if last is None:
            self._last_arrival = at
            return
        gap = max(0.0, at - last)
        self._last_arrival = max(last, at)
        if self._gap_s is None:
            self._gap_s = gap
            return
        if self._gap_s > 0:
            gap = min(gap, _LONG_GAPS * self._gap_s)
        self._gap_s += _PACE * (gap - self._gap_s)

    def ran(self, cost: int, seconds: float) -> None:
        """A batch of this cost took so long."""
        self._fit.learn((1.0, float(cost)), max(seconds, _TICK_S))

    def ends_at(self, count: int, cost: int, first: float, newest: float) -> float:
        """Until when items wait for more.

        Args:
            count: how many wait.
            cost: sum of their costs.
            first: when the first of them was accepted, in monotonic seconds.
            newest: when the last of them came to this worker.
        """
        latest = first + self._max_wait_s
        if not self._adaptive:
            return latest
        if self._gap_s is None or not self._fit.known:
            return newest
        each_batch, each_unit = self.costs
        worth_s = (each_batch - each_unit * cost) / (count + 1)
        if self._gap_s >= worth_s:
            return newest
        return min(latest, newest + worth_s)

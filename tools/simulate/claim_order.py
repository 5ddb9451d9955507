"""The order in which ``claim`` hands out waiting requests, in plain Python.

It models how ``claim.lua`` (with ``lib/queue.lua`` and ``lib/finish.lua``) decides who is next.
Lanes go by virtual time with weights 8:4:1, tenants inside a lane by virtual time in tokens:
start-time fair queueing (Goyal, Vin, Cheng, 1997). A test plays the same submissions, claims and
ends against the script on a real Redis and compares the order.
"""

from __future__ import annotations

import heapq
from collections import deque

from penstock.shared.protocol.states import LANE_WEIGHTS, Lane

from .arrivals import SimRequest

__all__ = ["FairQueue"]

_AHEAD = 1024
"""Virtual time by which displacing work may run ahead of a waiting lane."""


class FairQueue:
    """Waiting requests of one shard. O(log tenants) per operation."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, float] = {}
        self._tenants: dict[Lane, _Scores] = {lane: _Scores() for lane in Lane}
        self._served: dict[Lane | None, float] = {}  # the hash `vt`; None is its field `*`
        self._queues: dict[tuple[Lane, str], deque[SimRequest]] = {}
        self._num_waiting = dict.fromkeys(Lane, 0)

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def has_work(self, least_urgent: Lane) -> bool:
        """Whether a request waits in this lane or a more urgent one, and may be claimed."""
        rank = least_urgent.rank
        if not any(count and lane.rank <= rank for lane, count in self._num_waiting.items()):
            return False
        times = [time for lane, time in self._lanes.items() if lane.rank <= rank]
        return least_urgent is Lane.BATCH or not self._is_too_far_ahead(min(times))

    def push(self, request: SimRequest) -> None:
        """Accept a request. A tenant or lane that was idle starts at the current virtual time."""
        lane, tenant = request.lane, request.tenant
        tenants = self._tenants[lane]
        if tenant not in tenants:
            tenants.put(tenant, self._served.get(lane, 0.0))
        self._lanes.setdefault(lane, self._served.get(None, 0.0))
        self._queues.setdefault((lane, tenant), deque()).append(request)
        self._num_waiting[lane] += 1

    def claim(
        self, requests: int, tokens: int, least_urgent: Lane = Lane.BATCH, *, workers: int = 1
    ) -> list[SimRequest]:
        """Claim the next requests of this lane and more urgent ones, unless these are far ahead.

        Takes at most ``requests``, at most the worker's share of what waits, and stops once
        ``tokens`` are used up.
        """
        rank = least_urgent.rank
        waiting = sum(count for lane, count in self._num_waiting.items() if lane.rank <= rank)
        most = min(requests, max(1, -(-waiting // workers)))
        claims: list[SimRequest] = []
        while len(claims) < most and tokens > 0:
            request = self._next(least_urgent)
            if request is None:
                break
            tokens -= request.cost_estimate
            claims.append(request)
        return claims

    def correct_charge(self, request: SimRequest) -> None:
        """Refund the part of the charged estimate that an ended request did not use.

        Never below the current virtual time, or later arrivals would wait for the whole refund.
        """
        wrong = request.tokens - request.cost_estimate
        if not wrong:
            return
        lane, tenant, served = request.lane, request.tenant, self._served
        tenants = self._tenants[lane]
        if tenant in tenants:
            tenants.put(tenant, max(tenants.score(tenant) + wrong, served.get(lane, 0.0)))
        if lane in self._lanes:
            corrected = self._lanes[lane] + wrong / LANE_WEIGHTS[lane]
            self._lanes[lane] = max(corrected, served.get(None, 0.0))

    def _next(self, least_urgent: Lane) -> SimRequest | None:
        while wanted := [lane for lane in self._lanes if lane.rank <= least_urgent.rank]:
            # The smallest virtual time; among equals the most urgent lane.
            lane = min(wanted, key=lambda lane: (self._lanes[lane], lane.rank))
            time = self._lanes[lane]
            if least_urgent is Lane.BATCH:
                self._served[None] = time
            elif self._is_too_far_ahead(time):
                return None
            tenants = self._tenants[lane]
            first = tenants.first()
            if first is None:
                del self._lanes[lane]
                continue
            score, tenant = first
            self._served[lane] = score
            queue = self._queues.get((lane, tenant))
            if queue is None:
                tenants.remove(tenant)
                continue
            request = queue.popleft()
            if not queue:
                del self._queues[lane, tenant]
            self._num_waiting[lane] -= 1
            cost = request.cost_estimate
            tenants.put(tenant, score + cost)
            self._lanes[lane] = time + cost / LANE_WEIGHTS[lane]
            return request
        return None

    def _is_too_far_ahead(self, time: float) -> bool:
        """Whether waiting work of a less urgent lane goes next."""
        while self._lanes:
            lane = min(self._lanes, key=lambda lane: (self._lanes[lane], lane.rank))
            if time <= self._lanes[lane] + _AHEAD:
                return False
            first = self._tenants[lane].first()
            if first is None:
                del self._lanes[lane]
            elif (lane, first[1]) in self._queues:
                return True
            else:
                self._tenants[lane].remove(first[1])
        return False


class _Scores:
    """A sorted set: names by score, then by name, as Redis orders them."""

    def __init__(self) -> None:
        self._scores: dict[str, float] = {}
        # May hold stale entries: an entry counts if it has the name's current score.
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._scores

    def score(self, name: str) -> float:
        return self._scores[name]

    def put(self, name: str, score: float) -> None:
        self._scores[name] = score
        heapq.heappush(self._heap, (score, name))
        if len(self._heap) > 64 + 4 * len(self._scores):
            self._heap = [(score, name) for name, score in self._scores.items()]
            heapq.heapify(self._heap)

    def remove(self, name: str) -> None:
        del self._scores[name]

    def first(self) -> tuple[float, str] | None:
        while self._heap:
            score, name = self._heap[0]
            if self._scores.get(name) == score:
                return score, name
            heapq.heappop(self._heap)
        return None

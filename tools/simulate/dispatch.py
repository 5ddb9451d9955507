"""How a request finds its worker: a queue with claims, or a push at arrival."""

from __future__ import annotations

import enum
import itertools
import random

from penstock.gpu_worker.edge.claim_budget import ClaimBudget
from penstock.shared.protocol.states import Lane

from .arrivals import SimRequest
from .claim_order import FairQueue
from .fleet import Dispatcher, Fleet

__all__ = ["Dispatch", "LeastLoaded", "Pull", "RoundRobin", "dispatcher"]


class Dispatch(enum.StrEnum):
    """How requests find their worker."""

    PULL = "pull"
    """Requests wait in one queue, and workers with room claim them: penstock's way."""
    ROUND_ROBIN = "round-robin"
    """Pushed at arrival to the next worker in turn."""
    LEAST_LOADED = "least-loaded"
    """Pushed at arrival to the worker with the fewest open requests, known exactly and for free."""


class RoundRobin(Dispatcher):
    """Pushes to the workers in turn."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = itertools.cycle(range(len(fleet.nodes)))

    def arrived(self, request: SimRequest, now: float) -> None:
        """Deliver it half a round trip later."""
        index, fleet = next(self._turn), self._fleet
        fleet.at(now + fleet.exchange_s / 2, lambda time: fleet.deliver(index, [request], time))

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """Ignore the step."""


class LeastLoaded(Dispatcher):
    """Pushes to the worker with the fewest open requests, including those in transit."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open = [0] * len(fleet.nodes)

    def arrived(self, request: SimRequest, now: float) -> None:
        """Deliver it half a round trip later."""
        fleet = self._fleet
        index = self._open.index(min(self._open))
        self._open[index] += 1
        fleet.at(now + fleet.exchange_s / 2, lambda time: fleet.deliver(index, [request], time))

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """Count the ended requests."""
        del now
        self._open[index] -= len(ended)


class Pull(Dispatcher):
    """Workers claim as a worker's ``RedisLoop`` does.

    A worker claims with the exchange after each step, and when the bell rings. As in the product,
    :class:`ClaimBudget` says how much, and of which lanes. The bell wakes all that have room, and
    chance decides which of them comes first.

    Args:
        fleet: the workers.
        max_sequences: sequences that a worker runs at the same time.
        claim_batch: the most requests claimed in one exchange.
        step_tokens: the most query tokens of a worker's step.
        wake_s: seconds from the bell until a worker that hears it sends its claim.
        seed: decides which worker hears the bell first.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_sequences: int,
        claim_batch: int,
        step_tokens: int,
        wake_s: float,
        seed: int,
    ) -> None:
        self._fleet = fleet
        self._max_sequences = max_sequences
        self._claim_batch = claim_batch
        self._step_tokens = step_tokens
        self._wake_s = wake_s
        self._rng = random.Random(seed)
        self._queue = FairQueue()
        self._claiming = [False] * len(fleet.nodes)
        # Idle workers with room, by the least urgent lane they would take.
        self._listeners = {lane: _Crowd() for lane in Lane}
        self._hears: list[Lane | None] = [None] * len(fleet.nodes)
        for index in range(len(fleet.nodes)):
            self._listen(index, Lane.BATCH)

    @property
    def num_waiting(self) -> int:
        """Requests not yet claimed."""
        return len(self._queue)

    def arrived(self, request: SimRequest, now: float) -> None:
        """Queue the request and ring the bell."""
        self._queue.push(request)
        self._ring(now)

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """Exchange after a step: publish, and claim if there is room."""
        for request in ended:
            self._queue.correct_charge(request)
        if not self._claiming[index]:
            self._consider(index, now)

    def room(self, index: int) -> ClaimBudget:
        """What the worker would claim now."""
        node = self._fleet.nodes[index]
        return ClaimBudget.beside(
            node.open,
            node.load.waiting,
            node.arriving_tokens,
            max_sequences=self._max_sequences,
            claim_batch=self._claim_batch,
            step_tokens=self._step_tokens,
        )

    def _ring(self, now: float) -> None:
        crowds = [
            crowd for lane, crowd in self._listeners.items() if crowd and self._queue.has_work(lane)
        ]
        if crowds:
            crowd = crowds[0]
            if len(crowds) > 1:
                crowd = self._rng.choices(crowds, [len(crowd) for crowd in crowds])[0]
            self._consider(crowd.anyone(self._rng), now + self._wake_s)

    def _consider(self, index: int, at: float) -> None:
        """Schedule a claim if there is room and work; otherwise listen, or wait for room."""
        room = self.room(index)
        wants = room.requests > 0 and self._queue.has_work(room.least_urgent)
        self._listen(index, room.least_urgent if room.requests and not wants else None)
        if wants:
            self._claiming[index] = True
            half = self._fleet.exchange_s / 2
            self._fleet.at(at + half, lambda time: self._claim(index, room, time))

    def _claim(self, index: int, room: ClaimBudget, now: float) -> None:
        """Run the claim in Redis."""
        tokens = max(1, self._fleet.nodes[index].load.available_tokens)
        claims = self._queue.claim(
            room.requests, tokens, room.least_urgent, workers=len(self._hears)
        )
        if len(self._queue):
            self._ring(now)  # the others have heard the bell as well
        half = self._fleet.exchange_s / 2
        self._fleet.at(now + half, lambda time: self._land(index, claims, time))

    def _land(self, index: int, claims: list[SimRequest], now: float) -> None:
        """Receive the claim's answer."""
        self._claiming[index] = False
        if claims:
            self._fleet.deliver(index, claims, now)
        self._consider(index, now)

    def _listen(self, index: int, lane: Lane | None) -> None:
        """Listen for work of this lane and more urgent ones; None stops listening."""
        before = self._hears[index]
        if before is lane:
            return
        self._hears[index] = lane
        if before is not None:
            self._listeners[before].remove(index)
        if lane is not None:
            self._listeners[lane].add(index)


class _Crowd:
    """A set of workers that yields a random one in O(1)."""

    def __init__(self) -> None:
        self._members: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, index: int) -> None:
        self._places[index] = len(self._members)
        self._members.append(index)

    def remove(self, index: int) -> None:
        place, last = self._places.pop(index), self._members.pop()
        if last != index:
            self._members[place] = last
            self._places[last] = place

    def anyone(self, rng: random.Random) -> int:
        return self._members[rng.randrange(len(self._members))]


def dispatcher(
    kind: Dispatch,
    fleet: Fleet,
    *,
    max_sequences: int,
    claim_batch: int,
    step_tokens: int,
    wake_s: float,
    seed: int,
) -> Dispatcher:
    """Make the dispatcher of a kind; see :class:`Pull` for the arguments."""
    if kind is Dispatch.ROUND_ROBIN:
        return RoundRobin(fleet)
    if kind is Dispatch.LEAST_LOADED:
        return LeastLoaded(fleet)
    return Pull(
        fleet,
        max_sequences=max_sequences,
        claim_batch=claim_batch,
        step_tokens=step_tokens,
        wake_s=wake_s,
        seed=seed,
    )

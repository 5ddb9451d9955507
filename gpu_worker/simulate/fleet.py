"""The fleet in virtual time: who gets which request when, and when steps end."""

from __future__ import annotations

import enum
import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .lanes import FairQueue
from .node import Node
from .workload import SimRequest

__all__ = ["Dispatch", "Fleet", "LeastLoaded", "Pull", "RoundRobin", "Run", "dispatcher"]

Event = Callable[[float], None]


class Dispatch(enum.StrEnum):
    """How requests find their worker."""

    PULL = "pull"
    """They wait in one queue, and workers with room claim them: penstock."""
    ROUND_ROBIN = "round-robin"
    """Pushed at arrival to one worker after the other."""
    LEAST_LOADED = "least-loaded"
    """Pushed at arrival to the worker with the fewest open requests, known exactly at no cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run did, apart from latencies.

    Attributes:
        arrived, ended: requests.
        busy_s: sum over workers of the time they computed.
        makespan_s: from the begin to the last end.
        steps, spans: totals over all workers.
        output_tokens: sampled, as the engines count.
        preemptions: totals over all workers.
    """

    arrived: int
    ended: int
    busy_s: float
    makespan_s: float
    steps: int
    spans: int
    output_tokens: int
    preemptions: int


class Fleet:
    """Workers and the clock.

    Args:
        nodes: the workers.
        requests: in order of arrival.
        exchange_s: one round trip with Redis.
    """

    def __init__(
        self, nodes: list[Node], requests: Iterable[SimRequest], exchange_s: float
    ) -> None:
        self.nodes = nodes
        self.exchange_s = exchange_s
        self._requests: Iterator[SimRequest] = iter(requests)
        # Ties are broken by the order in which events were made: the same run every time.
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._stepping = [False] * len(nodes)
        self._busy_s = 0.0
        self._arrived = 0
        self._ended = 0
        self._now = 0.0

    def run(self, dispatcher: Dispatcher) -> Run:
        """Let all requests arrive, and the fleet work until nothing is left."""
        self._dispatcher = dispatcher
        self._await_next()
        events = self._events
        while events:
            self._now, _, event = heapq.heappop(events)
            event(self._now)
        return Run(
            arrived=self._arrived,
            ended=self._ended,
            busy_s=self._busy_s,
            makespan_s=self._now,
            steps=sum(node.steps for node in self.nodes),
            spans=sum(node.spans for node in self.nodes),
            output_tokens=sum(node.output_tokens for node in self.nodes),
            preemptions=sum(node.preemptions for node in self.nodes),
        )

    def at(self, time: float, event: Event) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def deliver(self, index: int, requests: list[SimRequest], now: float) -> None:
        """Requests reach a worker; it begins at once if it is idle."""
        self.nodes[index].deliver(requests)
        if not self._stepping[index]:
            self._begin(index, now)

    def is_stepping(self, index: int) -> bool:
        """Whether the worker computes now."""
        return self._stepping[index]

    def _begin(self, index: int, now: float) -> None:
        end = self.nodes[index].begin(now)
        self._stepping[index] = end is not None
        if end is not None:
            self._busy_s += end - now
            self.at(end, lambda time: self._complete(index, time))

    def _complete(self, index: int, now: float) -> None:
        ended = self.nodes[index].complete(now)
        self._ended += len(ended)
        self._dispatcher.stepped(index, ended, now)
        # What the worker claims now arrives while its next step runs already.
        self._begin(index, now)

    def _await_next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self.at(request.arrival, lambda now: self._arrive(request, now))

    def _arrive(self, request: SimRequest, now: float) -> None:
        self._arrived += 1
        self._dispatcher.arrived(request, now)
        self._await_next()


class Dispatcher(ABC):
    """Decides which worker gets a request."""

    @abstractmethod
    def arrived(self, request: SimRequest, now: float) -> None:
        """A request was accepted."""

    @abstractmethod
    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """A worker ended a step, and these requests with it."""


class RoundRobin(Dispatcher):
    """Pushes to one worker after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = itertools.cycle(range(len(fleet.nodes)))

    def arrived(self, request: SimRequest, now: float) -> None:
        """Half a round trip later it is there."""
        index, fleet = next(self._turn), self._fleet
        fleet.at(now + fleet.exchange_s / 2, lambda time: fleet.deliver(index, [request], time))

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """Nothing to learn."""


class LeastLoaded(Dispatcher):
    """Pushes to the worker with the fewest open requests, what is on its way included."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open = [0] * len(fleet.nodes)

    def arrived(self, request: SimRequest, now: float) -> None:
        """Half a round trip later it is there."""
        fleet = self._fleet
        index = self._open.index(min(self._open))
        self._open[index] += 1
        fleet.at(now + fleet.exchange_s / 2, lambda time: fleet.deliver(index, [request], time))

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """Room again."""
        del now
        self._open[index] -= len(ended)


class Pull(Dispatcher):
    """Workers claim as ``RedisEdge`` does.

    A worker claims with the exchange after each step while the last claim found something, and when
    the bell rings; only while all it claimed before has found its KV blocks; never more than fits.
    The bell wakes all that have room, and one of them comes first: chance decides.

    Args:
        fleet: the workers.
        max_sequences: requests a worker owns at the same time.
        claim_batch: requests claimed in one exchange at most.
        seed: of who hears the bell first.
    """

    def __init__(self, fleet: Fleet, *, max_sequences: int, claim_batch: int, seed: int) -> None:
        self._fleet = fleet
        self._max_sequences = max_sequences
        self._claim_batch = claim_batch
        self._rng = random.Random(seed)
        self._queue = FairQueue()
        self._claiming = [False] * len(fleet.nodes)
        # Workers with room that found nothing to claim. With their places: a random one in O(1).
        self._listeners = list(range(len(fleet.nodes)))
        self._place = list(range(len(fleet.nodes)))

    @property
    def num_waiting(self) -> int:
        """Requests that nobody has claimed."""
        return len(self._queue)

    def arrived(self, request: SimRequest, now: float) -> None:
        """Into its queue; the bell rings."""
        self._queue.push(request)
        self._ring(now)

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """The exchange after a step publishes, and claims if there is room."""
        for request in ended:
            self._queue.settle(request)
        if not self._claiming[index]:
            self._consider(index, now)

    def may_claim(self, index: int) -> int:
        """How many requests a worker would ask for now (``RedisEdge._room``)."""
        node = self._fleet.nodes[index]
        if node.load.waiting:
            return 0
        return max(0, min(self._claim_batch, self._max_sequences - node.open))

    def _ring(self, now: float) -> None:
        if self._listeners:
            index = self._listeners[self._rng.randrange(len(self._listeners))]
            self._consider(index, now)

    def _consider(self, index: int, now: float) -> None:
        """Claim if there is room and something waits; else listen, or wait for room."""
        room = self.may_claim(index)
        self._listen(index, room > 0 and not len(self._queue))
        if room and len(self._queue):
            self._claiming[index] = True
            half = self._fleet.exchange_s / 2
            self._fleet.at(now + half, lambda time: self._claim(index, room, time))

    def _claim(self, index: int, room: int, now: float) -> None:
        """The script runs in Redis."""
        tokens = max(1, self._fleet.nodes[index].load.free_tokens)
        claims = self._queue.claim(room, tokens)
        if len(self._queue):
            self._ring(now)  # the others have heard the bell, too
        half = self._fleet.exchange_s / 2
        self._fleet.at(now + half, lambda time: self._land(index, claims, time))

    def _land(self, index: int, claims: list[SimRequest], now: float) -> None:
        """Its answer has come."""
        self._claiming[index] = False
        if claims:
            self._fleet.deliver(index, claims, now)
        self._consider(index, now)

    def _listen(self, index: int, wanted: bool) -> None:
        listens = self._place[index] >= 0
        if wanted and not listens:
            self._place[index] = len(self._listeners)
            self._listeners.append(index)
        elif listens and not wanted:
            place, last = self._place[index], self._listeners.pop()
            self._place[index] = -1
            if last != index:
                self._listeners[place] = last
                self._place[last] = place


def dispatcher(
    kind: Dispatch, fleet: Fleet, *, max_sequences: int, claim_batch: int, seed: int
) -> Dispatcher:
    """The dispatcher of a kind."""
    if kind is Dispatch.ROUND_ROBIN:
        return RoundRobin(fleet)
    if kind is Dispatch.LEAST_LOADED:
        return LeastLoaded(fleet)
    return Pull(fleet, max_sequences=max_sequences, claim_batch=claim_batch, seed=seed)

"""The fleet in virtual time: workers, clock and ends of steps."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .arrivals import SimRequest
from .node import Node

__all__ = ["Dispatcher", "Fleet", "Run"]

Event = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Totals of a run, apart from latencies.

    Attributes:
        arrived, ended: requests.
        busy_s: computing time, summed over workers.
        makespan_s: from the start to the last end.
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


class Dispatcher(ABC):
    """Decides which worker gets a request."""

    @abstractmethod
    def arrived(self, request: SimRequest, now: float) -> None:
        """Handle an accepted request."""

    @abstractmethod
    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        """Handle the end of a worker's step, which ended these requests."""


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
        # Events at the same time run in the order of their creation: the same run every time.
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._stepping = [False] * len(nodes)
        self._busy_s = 0.0
        self._arrived = 0
        self._ended = 0
        self._now = 0.0

    def run(self, dispatcher: Dispatcher) -> Run:
        """Run until all requests have arrived and ended."""
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
        """Schedule an action."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def deliver(self, index: int, requests: list[SimRequest], now: float) -> None:
        """Deliver requests to a worker, which begins at once if idle."""
        self.nodes[index].deliver(requests)
        if not self._stepping[index]:
            self._begin(index, now)

    def is_stepping(self, index: int) -> bool:
        """Whether the worker is computing."""
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
        # What the worker claims now arrives while its next step runs already, and what it claimed
        # before has begun.
        self._begin(index, now)
        self._dispatcher.stepped(index, ended, now)

    def _await_next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self.at(request.arrival, lambda now: self._arrive(request, now))

    def _arrive(self, request: SimRequest, now: float) -> None:
        self._arrived += 1
        self._dispatcher.arrived(request, now)
        self._await_next()

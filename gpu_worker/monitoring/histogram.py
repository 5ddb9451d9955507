"""A histogram that takes many values in one call, most of them equal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["TallyHistogram"]


class TallyHistogram(Collector):
    """A Prometheus histogram without labels that takes a whole step's values in one call.

    The tokens of one step have few different gaps before them. To observe each token in
    prometheus_client's own histogram would take as long as to publish it.

    Args:
        name: with its unit, as it is exposed.
        meaning: help text.
        buckets: upper bounds, ascending; that of infinity is added.
        registry: where it is exposed.
    """

    def __init__(
        self, name: str, meaning: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._meaning = name, meaning
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = Lock()
        registry.register(self)

    def observe(self, tally: Iterable[tuple[float, int]]) -> None:
        """Count values, each as often as it says."""
        with self._lock:
            for value, times in tally:
                self._counts[bisect_left(self._bounds, value)] += times
                self._sum += value * times

    def describe(self) -> list[Metric]:
        """The metric without values, by which the registry knows its names."""
        return [HistogramMetricFamily(self._name, self._meaning)]

    def collect(self) -> Iterator[Metric]:
        """The metric as of now."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        rows, sum_so_far = [], 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            sum_so_far += count
            rows.append((repr(bound) if bound < float("inf") else "+Inf", sum_so_far))
        family = HistogramMetricFamily(self._name, self._meaning)
        family.add_metric((), rows, total)
        yield family

"""What the gateway counts, for Prometheus.

The processes of one gateway add up what they count in a folder that ``PROMETHEUS_MULTIPROC_DIR``
names, so each of them gives the figures of all.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

__all__ = ["GatewayMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """The metrics of one process.

    Attributes:
        registry: holds them.
        requests: answers by endpoint and status; 499 if the client left.
        refused_heads: requests that were refused before their endpoint was known, by code.
        open_streams: event streams that are open.
        stream_tokens: tokens sent in events.
        first_token: from a new request to its first token, in seconds; comments are none.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_gateway_requests_total",
            "Answers by endpoint and HTTP status; 499: the client left.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.refused_heads = Counter(
            "penstock_gateway_refused_heads_total",
            "Requests refused for their head, by code: too large, too slow, or no HTTP.",
            ("code",),
            registry=self.registry,
        )
        self.open_streams = Gauge(
            "penstock_gateway_open_streams",
            "Event streams that are open.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.stream_tokens = Counter(
            "penstock_gateway_stream_tokens_total",
            "Tokens sent in events.",
            registry=self.registry,
        )
        self.first_token = Histogram(
            "penstock_gateway_time_to_first_token_seconds",
            "From a new streaming request to its first token.",
            registry=self.registry,
            buckets=_SECONDS,
        )

    def count_refused_head(self, code: str) -> None:
        """A request was refused before its endpoint was known."""
        self.refused_heads.labels(code).inc()

    def exposition(self) -> bytes:
        """The page that Prometheus reads."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

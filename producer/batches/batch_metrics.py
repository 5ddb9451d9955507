"""What a ``penstock batches`` process counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from penstock.shared.errors import ConfigurationError

from .stores.records import Batch

__all__ = ["BatchMetrics"]


class BatchMetrics:
    """The metrics of one process. What another process drives, it counts itself.

    Attributes:
        registry: holds them.
        driven: batches that this process drives now.
        ended: batches by the state in which they ended.
        lines: ended lines, by whether they have an answer.
        tokens: of ended lines, by kind.
        webhook_calls: attempts, by whether they succeeded.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.driven = Gauge(
            "penstock_batches_driven",
            "Batches that this process drives now.",
            registry=self.registry,
        )
        self.ended = self._counter("batches_ended", "Batches that ended, by state.", "state")
        self.lines = self._counter("batch_lines", "Lines of batches that ended.", "outcome")
        self.tokens = self._counter("batch_tokens", "Tokens of lines that ended.", "kind")
        self.webhook_calls = self._counter("webhook_calls", "Attempts to call webhooks.", "outcome")

    def changed(self, before: Batch, after: Batch) -> None:
        """Count what the next version of a batch's record adds."""
        self.lines.labels("answered").inc(after.completed - before.completed)
        self.lines.labels("failed").inc(after.failed - before.failed)
        for kind, tokens in after.usage:
            self.tokens.labels(kind.removesuffix("_tokens")).inc(
                tokens - getattr(before.usage, kind)
            )
        if after.ended and not before.ended:
            self.ended.labels(after.state).inc()

    def called(self, ok: bool) -> None:
        """Count an attempt to call a webhook."""
        self.webhook_calls.labels("succeeded" if ok else "failed").inc()

    @contextmanager
    def served(self, host: str, port: int | None) -> Iterator[int | None]:
        """Serve ``/metrics`` in a thread of its own; None as the port serves nothing.

        Yields:
            The port.

        Raises:
            ConfigurationError: nothing can be served there.
        """
        if port is None:
            yield None
            return
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigurationError(
                f"batches.metrics_port: got {port}; {host} does not let it serve there "
                f"({error.strerror}); choose another one, 0 for a free one, or off"
            ) from None
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"penstock_{name}_total", text, (label,), registry=self.registry)

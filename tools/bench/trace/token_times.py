"""When the tokens of each request arrived, and the figures that follow from it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...rounds import Rounds, percentile
from .trace_file import TraceRequest

__all__ = ["TokenTimes"]


class TokenTimes:
    """Records the arrival of tokens, in seconds since :meth:`start`.

    Args:
        requests: the trace.
        rate: requests per second; None for all at once.
    """

    def __init__(self, requests: Sequence[TraceRequest], rate: float | None) -> None:
        self.arrivals = [request.arrival_s(rate) for request in requests]
        self._chunks: list[list[tuple[float, int]]] = [[] for _ in requests]
        self._began = time.perf_counter()

    def start(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since :meth:`start`."""
        return time.perf_counter() - self._began

    def add(self, index: int, tokens: int) -> None:
        """Record tokens of the request at ``index`` that arrived now."""
        self._chunks[index].append((self.now(), tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens recorded so far."""
        return sum(tokens for chunks in self._chunks for _, tokens in chunks)

    def summarise(self, rounds: Rounds, prefix: str = "") -> None:
        """Add this run's figures to ``rounds``: throughput, TTFT, ITL and latency.

        TTFT and latency count from the arrival that the trace sets. Tokens that came together
        share the time since the chunk before evenly.
        """
        ttft, latency, gaps = [], [], []
        for arrival, chunks in zip(self.arrivals, self._chunks, strict=True):
            (first, tokens), *rest = chunks
            ttft.append(first - arrival)
            gaps += [0.0] * (tokens - 1)
            before = first
            for at, tokens in rest:
                gaps += [(at - before) / tokens] * tokens
                before = at
            latency.append(before - arrival)
        end = max(chunks[-1][0] for chunks in self._chunks)
        rounds.add(f"{prefix}output_tokens_per_s", self.num_tokens / end)
        for name, values in (("ttft", ttft), ("itl", gaps or [0.0]), ("latency", latency)):
            for percent in (50, 90, 99):
                figure = f"{prefix}{name}_ms_p{percent}"
                rounds.add(figure, 1e3 * percentile(values, percent))

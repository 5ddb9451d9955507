"""What the metrics of the demo's workers say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from .summary import EngineFigures

__all__ = ["MetricsWatch", "parse_metrics"]

_SAMPLE_S = 0.05


@dataclass(slots=True)
class _Seen:
    """Of one worker.

    Attributes:
        port: of its ``/metrics`` on 127.0.0.1.
        first: the first sample.
        last: the last one.
        kv_peak: most KV blocks seen in use.
    """

    port: int
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    kv_peak: float = 0.0

    def gain(self, name: str) -> float:
        """What a counter has gained since the first sample."""
        return self.last.get(name, 0.0) - self.first.get(name, 0.0)


class MetricsWatch:
    """Watches the ``/metrics`` of workers from the first to the last :meth:`sample`.

    Args:
        ports: where they are served on 127.0.0.1; None for a worker that serves none.
    """

    def __init__(self, ports: Sequence[int | None]) -> None:
        self._workers = [_Seen(port) for port in ports if port is not None]

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(_SAMPLE_S)

    async def sample(self) -> None:
        """Look once; a worker that does not answer now is asked the next time."""
        for worker in self._workers:
            with contextlib.suppress(OSError, EOFError):
                worker.last = parse_metrics(await _get_metrics(worker.port))
                worker.first = worker.first or worker.last
                used = worker.last.get("penstock_kv_blocks_used", 0.0)
                worker.kv_peak = max(worker.kv_peak, used)

    def figures(self) -> EngineFigures:
        """What was seen of all workers together."""
        totals = [worker.last.get("penstock_kv_blocks_total") for worker in self._workers]
        known = [int(total) for total in totals if total is not None]
        steps = sum(worker.gain("penstock_step_sequences_count") for worker in self._workers)
        rows = sum(worker.gain("penstock_step_sequences_sum") for worker in self._workers)
        return EngineFigures(
            mean_batch=rows / steps if steps else None,
            kv_blocks_peak=int(sum(worker.kv_peak for worker in self._workers)) if known else None,
            kv_blocks_total=sum(known) if known else None,
        )


def parse_metrics(text: str) -> dict[str, float]:
    """Values of Prometheus' text format by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


async def _get_metrics(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(1):
            answer = await reader.read(-1)
    finally:
        writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()

"""One load, served without batches, by fixed sizes, by windows, and in the application itself.

Requests come at random times, at a rate that does not depend on the answers (an open loop). If a
mode cannot keep up, its latencies grow as long as the load lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from penstock.producer import Producer
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import Settings, load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds, percentile
from ..engine.worker_process import worker_process
from ..options import BatcherOptions
from .asyncio_batcher import AsyncioBatcher
from .batcher_plot import plot_modes
from .timed_model import TARGET, TimedModel

__all__ = ["bench_batcher"]

_MAX_BATCH = 32
_FIXED_SIZE = 16
_WINDOW_MS = 5.0
_ENDLESS_MS = 1000.0
"""A batch of a fixed size waits for its last item; the rest of the load must end some time."""

_WORKERS: dict[str, dict[str, object]] = {
    "unbatched": {"max_batch": 1},
    "size": {"max_batch": _FIXED_SIZE, "max_wait_ms": _ENDLESS_MS, "window": "fixed"},
    "window": {"max_batch": _MAX_BATCH, "max_wait_ms": _WINDOW_MS, "window": "fixed"},
    "adaptive": {"max_batch": _MAX_BATCH, "max_wait_ms": _WINDOW_MS, "window": "adaptive"},
}
_IN_PROCESS = "asyncio"

_Infer = Callable[[Any], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one load.

    Attributes:
        seconds: from the first request to the last answer.
        latencies_s: of each request.
        sizes: of the batch that each request was in.
    """

    seconds: float
    latencies_s: list[float]
    sizes: list[int]


def bench_batcher(options: BatcherOptions, progress: Progress = lambda *_: None) -> Report:
    """Each mode under each rate, ``rounds`` times, through Redis and a worker process.

    Raises:
        PenstockError: no server, or a worker does not start.
        ConfigurationError: the plot cannot be written.
    """
    return asyncio.run(_bench(options, progress))


async def _bench(options: BatcherOptions, progress: Progress) -> Report:
    machine, rounds = Machine(), Rounds()
    modes, done = [*_WORKERS, _IN_PROCESS], 0
    async with EmbeddedRedis() as server:
        for number in range(options.rounds):
            for mode in modes:
                async with _serving(mode, server.url) as infer:
                    await _load(infer, options, 50.0, 0.5, seed=0)  # it learns what batches cost
                    for rate in options.rates:
                        progress(mode, done, options.rounds * len(modes) * len(options.rates))
                        served = await _load(infer, options, rate, options.seconds, seed=number)
                        _add(rounds, f"{mode}.r{rate}", served)
                        done += 1
    low, high = min(options.rates), max(options.rates)
    for name, base in (("adaptive", "unbatched"), ("adaptive", _IN_PROCESS)):
        pairs = rounds.ratios(f"{name}.r{high}.requests_per_s", f"{base}.r{high}.requests_per_s")
        for ratio in pairs:
            rounds.add(f"{name}_over_{base}.throughput", ratio)
    for ratio in rounds.ratios(f"adaptive.r{low}.p50_ms", f"window.r{low}.p50_ms"):
        rounds.add("adaptive_over_window.p50", ratio)
    if options.plot is not None:
        plot_modes(
            {
                mode: {
                    rate: rounds.median(f"{mode}.r{rate}.p99_ms") for rate in options.rates
                }
                for mode in modes
            },
            options.plot,
        )  # fmt: skip
    what = (
        f"a batch takes {options.batch_ms:g} ms and {options.item_ms:g} ms for each item; requests "
        f"come at random for {options.seconds:g} s at each rate; size {_FIXED_SIZE}, window "
        f"{_WINDOW_MS:g} ms with at most {_MAX_BATCH}"
    )
    return rounds.report(
        "batcher",
        machine,
        at_least=[("adaptive_over_unbatched.throughput", 2.0)],
        at_most=[("adaptive_over_window.p50", 1.05)],
        notes=[what],
    )


def _add(rounds: Rounds, name: str, served: Served) -> None:
    rounds.add(f"{name}.requests_per_s", len(served.latencies_s) / served.seconds)
    rounds.add(f"{name}.p50_ms", 1e3 * percentile(served.latencies_s, 50))
    rounds.add(f"{name}.p99_ms", 1e3 * percentile(served.latencies_s, 99))
    num_batches = sum(1 / size for size in served.sizes)
    rounds.add(f"{name}.mean_batch", len(served.sizes) / num_batches)


async def _load(
    infer: _Infer, options: BatcherOptions, rate: float, seconds: float, *, seed: int
) -> Served:
    """Poisson arrivals at a rate per second; the same ones for every mode."""
    rng, loop = random.Random(f"{seed} {rate}"), asyncio.get_running_loop()
    item = [options.batch_ms, options.item_ms]
    latencies: list[float] = []

    async def ask() -> int:
        began = time.perf_counter()
        size = await infer(item)
        latencies.append(time.perf_counter() - began)
        return size

    began = at = loop.time()
    tasks: list[asyncio.Task[int]] = []
    while (at := at + rng.expovariate(rate)) < began + seconds or not tasks:
        await asyncio.sleep(at - loop.time())
        tasks.append(asyncio.create_task(ask()))
    sizes = await asyncio.gather(*tasks)
    return Served(loop.time() - began, latencies, list(sizes))


@contextlib.asynccontextmanager
async def _serving(mode: str, url: str) -> AsyncIterator[_Infer]:
    """What answers in this mode."""
    if mode == _IN_PROCESS:
        batcher = AsyncioBatcher(TimedModel().infer, _MAX_BATCH, _WINDOW_MS / 1000)
        yield batcher
        batcher.close()
        return
    settings = _settings(mode, url)
    async with (
        worker_process(settings),
        Producer(url, settings=settings, inbox=True) as producer,
    ):
        yield producer.infer


def _settings(mode: str, url: str) -> Settings:
    values = {f"batcher.{name}": value for name, value in _WORKERS[mode].items()}
    return load_settings(
        {
            "redis.url": url,
            "queue.model": f"bench-{secrets.token_hex(4)}",
            "queue.max_queued_requests": 1_000_000,
            "queue.tenant_share": 0,
            "worker.metrics_port": "off",
            "worker.log_level": "warning",
            "batcher.target": TARGET,
            **values,
        }
    )

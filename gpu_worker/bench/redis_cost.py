"""What the way through Redis takes of an engine's throughput.

The same trace goes through a worker process and through the same engine in this process, in turn,
and which is first changes from pair to pair: what is compared is two neighbours of a few seconds
each. A machine with few cores takes part in the answer, since the server and the reader need some
of what the engine would use; so CPU is told, too, which other processes disturb less than time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis

from penstock.shared.embedded import EmbeddedRedis
from penstock.shared.keys import Keys
from penstock.shared.settings import Settings

from .generation import EngineSide
from .rounds import Rounds, process_s
from .through_redis import run_through_redis, worker_process
from .traces import Trace, requests_of

__all__ = ["measure_redis_cost"]


async def measure_redis_cost(
    side: EngineSide,
    settings: Settings,
    rounds: Rounds,
    *,
    new_trace: Callable[[], Trace],
    slots: int,
    pairs: int,
    progress: Callable[[], None],
) -> None:
    """Run ``pairs`` traces both ways.

    Adds per pair ``tokens_per_s_in_process``, ``tokens_per_s_through_redis``,
    ``redis_cost_percent`` (of time, one over the other); where the system tells, also
    ``redis_cost_cpu_percent`` (CPU of the whole worker process, over that of the engine here: what
    a worker does beside its model) and ``cores_beside_worker`` (CPU cores that the server and the
    reader kept busy meanwhile).

    Args:
        side: the engine in this process.
        settings: the worker's, but for Redis and what ``side`` and ``slots`` decide.
        rounds: gets the figures.
        new_trace: makes one trace after the other.
        slots: sequences that run at the same time.
        pairs: how many.
        progress: told when a pair is done.
    """
    tree = settings.model_dump()
    tree["engine"].update(threads=side.threads, max_sequences=slots)
    keys = Keys("bench")
    async with EmbeddedRedis() as server, Redis.from_url(server.url) as observer:
        tree["redis"].update(url=server.url)

        async def server_s() -> float:
            cpu = await observer.info("cpu")
            return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

        async with worker_process(Settings.model_validate(tree)) as pid:

            async def through_redis(trace: Trace, name: str) -> tuple[float, float, float]:
                """Seconds, CPU of the worker, and CPU of server and reader."""
                requests = requests_of(trace, name)
                worker, beside = process_s(pid), await server_s() + time.process_time()
                seconds = await run_through_redis(server.url, keys, requests)
                beside = await server_s() + time.process_time() - beside
                return seconds, process_s(pid) - worker, beside

            def in_process(trace: Trace) -> tuple[float, float]:
                """Seconds and CPU."""
                cpu = time.process_time()
                seconds, _ = side.run(trace, slots)
                return seconds, time.process_time() - cpu

            await through_redis(new_trace(), "warm-up")
            for index in range(pairs):
                trace = new_trace()
                if index % 2:
                    with_redis = await through_redis(trace, f"pair-{index}")
                    without = in_process(trace)
                else:
                    without = in_process(trace)
                    with_redis = await through_redis(trace, f"pair-{index}")
                _add_pair(rounds, sum(item.max_tokens for item in trace), without, with_redis)
                progress()


def _add_pair(
    rounds: Rounds,
    tokens: int,
    without: tuple[float, float],
    with_redis: tuple[float, float, float],
) -> None:
    (seconds, cpu), (redis_seconds, worker_cpu, beside) = without, with_redis
    rounds.add("tokens_per_s_in_process", tokens / seconds)
    rounds.add("tokens_per_s_through_redis", tokens / redis_seconds)
    rounds.add("redis_cost_percent", 100 * (redis_seconds / seconds - 1))
    if worker_cpu == worker_cpu:  # not NaN
        rounds.add("redis_cost_cpu_percent", 100 * (worker_cpu / cpu - 1))
    rounds.add("cores_beside_worker", beside / redis_seconds)

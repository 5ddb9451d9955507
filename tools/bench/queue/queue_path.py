"""The way through Redis: what it costs the worker and the server, and how long it takes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.redis.address import redact_url
from penstock.shared.redis.opening import open_pool

from ...report import Number, Report
from ...rounds import Machine, Progress, Rounds
from ..options import QueueOptions
from .latency import measure_claims, measure_tokens
from .queue_depth import measure_depth, measure_fairness
from .step_expense import measure_steps

__all__ = ["bench_queue"]

_RUNNING = 256
_TOKENS_PER_S = 10_000

_AT_MOST: tuple[tuple[str, Number], ...] = (
    ("worker_cpu_us_per_token_256", 1.5),
    ("redis_cpu_us_per_token_256", 6),
    ("round_trips_per_step", 1),
    ("step_ms_p99_256", 3),
    ("submit_to_claim_ms_p99", 3),
    ("token_to_subscriber_ms_p99_10k", 10),
)
_AT_LEAST: tuple[tuple[str, Number], ...] = (("unpipelined_ratio_256", 40),)


def bench_queue(options: QueueOptions, progress: Progress = lambda *_: None) -> Report:
    """Measure everything between the engine and a reader, on real parts without an engine.

    Raises:
        RedisUnavailable: the server cannot be reached, or none can be started.
    """
    return asyncio.run(_bench(options, progress))


async def _bench(options: QueueOptions, progress: Progress) -> Report:
    rounds, stages = Rounds(), 3 * options.rounds + 2
    async with _server(options.redis) as (url, server):
        machine = Machine()
        with calm_collector():
            async with _shard(url) as keys:
                progress("steps", 0, stages)
                await measure_steps(
                    url, keys, rounds,
                    running=_RUNNING, repeats=options.rounds, steps=options.steps,
                )  # fmt: skip
            for done in range(options.rounds):
                progress("submit to claim", options.rounds + done, stages)
                async with _shard(url) as keys:
                    await measure_claims(url, keys, rounds, submits=options.submits)
                progress("token to subscriber", 2 * options.rounds + done, stages)
                async with _shard(url) as keys:
                    await measure_tokens(
                        url, keys, rounds, per_s=_TOKENS_PER_S, seconds=options.seconds
                    )
            progress("long queue", stages - 2, stages)
            async with _shard(url) as keys:
                await measure_depth(url, keys, rounds, queued=options.queued)
            progress("fair shares", stages - 1, stages)
            async with _shard(url) as tenants, _shard(url) as lanes:
                flood, others = options.queued // 5, options.queued // 200
                await measure_fairness(url, tenants, lanes, rounds, flood=flood, others=others)
    return rounds.report(
        "queue", machine, at_most=_AT_MOST, at_least=_AT_LEAST, notes=[f"Redis: {server}"]
    )


@asynccontextmanager
async def _server(url: str | None) -> AsyncIterator[tuple[str, str]]:
    """The server's address and its description for the report."""
    if url is None:
        async with EmbeddedRedis() as server:
            yield server.url, f"{server.binary.kind} {server.binary.version}, started for this"
        return
    try:
        async with Redis.from_pool(open_pool(url)) as redis:
            facts = await redis.info()
    except (RedisError, OSError) as error:
        raise RedisUnavailable(
            f"cannot measure {redact_url(url)}: {error}; start the server, or leave out --redis"
        ) from None
    aof = "with AOF" if facts["aof_enabled"] else "without AOF"
    yield url, f"{redact_url(url)}, version {facts['redis_version']}, {aof}"


@asynccontextmanager
async def _shard(url: str) -> AsyncIterator[Keys]:
    """Keys of a fresh shard, which are removed afterwards."""
    keys = Keys(f"bench-{secrets.token_hex(4)}")
    async with Redis.from_url(url) as redis:
        try:
            yield keys
        finally:
            pattern = keys.prefix.replace("{", "\\{").replace("}", "\\}") + "*"
            names = [name async for name in redis.scan_iter(pattern, count=1000)]
            for start in range(0, len(names), 500):
                await redis.unlink(*names[start : start + 500])

"""The arq worker that drives batches ends when it is told to."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from arq import Worker
from arq.connections import RedisSettings, create_pool
from redis.exceptions import ConnectionError as RedisConnectionError

from penstock.producer.batches.job_worker import run_until
from penstock.shared.local.embedded import EmbeddedRedis


class _DeafWorker(Worker):
    """Goes on once when cancelled, as ``asyncio.wait_for`` may do in Python 3.11."""

    polled = 0

    async def _poll_iteration(self) -> None:
        if not self.polled:
            self.polled = 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                for _ in range(100):
                    await self.pool.ping()  # its connections are still there
                self.polled = 2
        await super()._poll_iteration()


@pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # arq's own
async def test_a_worker_that_loses_its_cancellation_is_cancelled_again(
    server: EmbeddedRedis,
) -> None:
    """It once started a job on connections that were closed, and said so in a traceback."""

    async def nothing(ctx: dict[Any, Any]) -> None:
        del ctx

    pool = await create_pool(RedisSettings.from_dsn(server.url))
    worker = _DeafWorker([nothing], redis_pool=pool, handle_signals=False)
    stop = asyncio.Event()
    running = asyncio.create_task(run_until(stop, lambda: worker))
    while not worker.polled:
        await asyncio.sleep(0)
    stop.set()
    await asyncio.wait_for(running, 30)
    assert worker.polled == 2


@pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # arq's own
async def test_a_jobs_end_that_redis_does_not_hear_is_one_line(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Arq shields the end of a job that is cut off, and does not await it."""

    async def nothing(ctx: dict[Any, Any]) -> None:
        del ctx

    async def end_of_a_job() -> None:
        raise RedisConnectionError("Connection closed by server.")

    pool = await create_pool(RedisSettings.from_dsn(server.url))
    worker = Worker([nothing], redis_pool=pool, handle_signals=False)
    stop = asyncio.Event()
    running = asyncio.create_task(run_until(stop, lambda: worker))
    await asyncio.wait([asyncio.create_task(end_of_a_job())])
    gc.collect()
    stop.set()
    await asyncio.wait_for(running, 30)
    (told,) = [record for record in caplog.records if "a job's end" in record.message]
    assert told.levelname == "WARNING"
    assert "Connection closed by server." in told.message
    assert not [record for record in caplog.records if record.name == "asyncio"]

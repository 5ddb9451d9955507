"""The arq worker that drives batches, webhooks and schedules: ``penstock batches``.

After a kill, arq holds a job back for the longest timeout of any function. So jobs are short: each
drives one batch for some seconds, and queues the next. A sweep every five seconds starts what
should run and does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgpack
from arq import Worker, cron, func
from arq.connections import ArqRedis
from arq.cron import CronJob
from arq.typing import WorkerCoroutine
from arq.worker import Function
from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from penstock.shared.errors import PenstockError, RedisUnavailable
from penstock.shared.local.tasks import end_tasks
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

from .batch_metrics import BatchMetrics
from .batch_service import BatchService
from .driver import Driver
from .stores.batch_store import UnknownBatch
from .webhooks.caller import WebhookCaller
from .webhooks.deliveries import signing_keys

__all__ = ["QUEUE", "make_worker", "run_until"]

QUEUE = "ps:{batches}:arq"
"""Name of arq's queue. Its other keys begin with ``arq:``, on the same server."""

_TICK_S = 20.0
_RETRY_S = 1.0
_JOB_TIMEOUT_S = 60
_RESUME_SECONDS = set(range(60))
_SWEEP_SECONDS = set(range(0, 60, 5))
_JOBS_AT_ONCE = 16
_TRIES = 1_000_000
"""A job that was cut off runs again. What it works on decides when to stop, not arq."""

_log = logging.getLogger(__name__)


def make_worker(
    settings: Settings, service: BatchService, client: RetryingClient, metrics: BatchMetrics
) -> Worker:
    """The arq worker, for :func:`run_until`.

    Args:
        settings: the whole tree.
        service: the batches.
        client: the connection whose address arq uses, too.
        metrics: what is counted.

    Raises:
        ConfigurationError: a webhook secret is wrong.
    """
    keys = signing_keys(service.webhook_secrets())
    private = settings.batches.webhook_private
    caller = WebhookCaller(keys, allow_private=private, on_call=metrics.called)
    jobs = _Jobs(service, service.driver(metrics), caller)
    return Worker(
        functions=[_function("tick", jobs.tick), _function("deliver", jobs.deliver)],
        cron_jobs=[
            _cron("resume", jobs.resume, _RESUME_SECONDS),
            _cron("sweep", jobs.sweep, _SWEEP_SECONDS),
        ],
        redis_pool=_pool(client),
        queue_name=QUEUE,
        max_jobs=_JOBS_AT_ONCE,
        job_timeout=_JOB_TIMEOUT_S,
        keep_result=0,
        max_tries=_TRIES,
        poll_delay=0.2,
        job_serializer=msgpack.packb,
        job_deserializer=_unpack,
        log_results=False,
        handle_signals=False,
    )


async def run_until(stop: asyncio.Event, make: Callable[[], Worker]) -> None:
    """Run an arq worker until told to stop; another one whenever Redis has gone away.

    arq's own worker ends with the first connection that breaks.

    Args:
        stop: when to end. The jobs that run are cut off; others take them up.
        make: makes a worker.
    """
    asyncio.get_running_loop().set_exception_handler(_report_unheard)
    stopping = asyncio.create_task(stop.wait())
    while not stop.is_set():
        worker = make()
        running = asyncio.create_task(worker.async_run())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        await end_tasks([running])  # first: it would start jobs on connections that are closed
        await _close(worker)
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        if stop.is_set():
            break
        if not isinstance(outcome, RedisError | PenstockError | OSError):
            raise RuntimeError("the arq worker has ended") from outcome
        _log.warning("Redis did not answer (%s); trying again in %g s", outcome, _RETRY_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(stopping), _RETRY_S)
    await stopping


def _report_unheard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log in one line that Redis was away when arq recorded the end of a job that was cut off.

    Arq awaits no such end, so asyncio would print its error with a traceback.
    """
    error = context.get("exception")
    if isinstance(error, RedisError | OSError):
        _log.warning("a job's end did not reach Redis (%s); it will run again", error)
    else:
        loop.default_exception_handler(context)


async def _close(worker: Worker) -> None:
    try:
        await worker.close()
    except (RedisError, OSError, asyncio.CancelledError):  # of a job that was cut off
        await worker.pool.aclose(close_connection_pool=True)


class _Jobs:
    """The functions that arq calls."""

    def __init__(self, service: BatchService, driver: Driver, caller: WebhookCaller) -> None:
        self._service = service
        self._driver = driver
        self._caller = caller

    async def tick(self, ctx: dict[Any, Any], batch_id: str) -> None:
        """Drive a batch for a while, and queue the next tick."""
        with contextlib.suppress(UnknownBatch):
            if await self._driver.tick(batch_id, budget_s=_TICK_S):
                await self._queue_tick(ctx["redis"], batch_id)
            else:
                await self._queue_due(ctx["redis"])

    async def deliver(self, ctx: dict[Any, Any], delivery_id: str) -> None:
        """Make one webhook call."""
        del ctx  # arq gives it to every function
        await self._service.deliveries.attempt(delivery_id, self._caller)

    async def resume(self, ctx: dict[Any, Any]) -> None:
        """Queue ticks for new batches, and for those whose driver has died."""
        for batch_id in await self._service.batches.undriven():
            await self._queue_tick(ctx["redis"], batch_id)

    async def sweep(self, ctx: dict[Any, Any]) -> None:
        """Fire schedules, queue webhook calls, and delete what has expired or was left behind.

        What fails of it does not hold up the rest.
        """
        service = self._service
        for work in (
            service.fire_schedules,
            service.request_ends.queue_calls,
            functools.partial(self._queue_due, ctx["redis"]),
            service.files.delete_expired,
            service.leftovers.sweep,
        ):
            try:
                await work()
            except (RedisUnavailable, RedisError):
                raise
            except Exception:
                _log.exception("a part of the sweep has failed; the next one tries it again")

    async def _queue_tick(self, pool: ArqRedis, batch_id: str) -> None:
        if not await self._service.batches.may_queue(batch_id):
            return
        # A name of its own each time: arq refuses that of a job which was killed for a minute.
        name = f"tick:{batch_id}:{time.time_ns()}"
        await pool.enqueue_job("tick", batch_id, _job_id=name, _queue_name=QUEUE)

    async def _queue_due(self, pool: ArqRedis) -> None:
        for delivery_id in await self._service.deliveries.due():
            # One at a time for a delivery, while its job is queued or runs.
            name = f"deliver:{delivery_id}"
            await pool.enqueue_job("deliver", delivery_id, _job_id=name, _queue_name=QUEUE)


def _pool(client: RetryingClient) -> ArqRedis:
    """Arq's connections, to where ours go."""
    ours = client.redis.connection_pool
    pool = ConnectionPool(connection_class=ours.connection_class, **ours.connection_kwargs)
    return ArqRedis(
        pool,
        job_serializer=msgpack.packb,
        job_deserializer=_unpack,
        default_queue_name=QUEUE,
    )


def _function(name: str, run: Callable[..., Awaitable[None]]) -> Function:
    return func(cast(WorkerCoroutine, run), name=name)


def _cron(name: str, run: Callable[..., Awaitable[None]], seconds: set[int]) -> CronJob:
    coroutine = cast(WorkerCoroutine, run)
    return cron(coroutine, name=name, second=seconds, run_at_startup=True, timeout=30)


def _unpack(data: bytes) -> dict[str, Any]:
    unpacked: dict[str, Any] = msgpack.unpackb(data, raw=False, strict_map_key=False)
    return unpacked

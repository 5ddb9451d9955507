"""``penstock demo``: the main job, end to end, on this machine.

A real Redis server, a real worker in its own process, a dozen requests in three lanes for two
tenants. The batch lane is submitted first, so that one can see urgent work go past it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.shared.distribution import install_command
from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.local.embedded import open_redis
from penstock.shared.settings import Settings, load_settings

from ...client import Producer
from ..options import ConfigOption, JsonOption, RedisOption
from .local_worker import DemoWorker, Sampler, worker_command
from .summary import DemoReport, Row, demo_rows
from .view import PlainView, make_view

__all__ = ["demo", "run_demo"]

_SILENCE_S = 30.0


def demo(
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Checkpoint directory, or demo for the shipped one.")
    ] = "demo",
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> int:
    """Show the whole pipe at work: a Redis server, a worker, a dozen requests side by side.

    Uses REDIS_URL if set, else starts a server for the time of the demo. Nothing is left running.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError(
            f"the demo runs a worker, which needs the package torch: {install_command('worker')}"
        )
    settings = load_settings({"redis.url": redis, "model.path": model}, config=config)
    return run_demo(settings, make_view(json=json), worker_command(model))


def run_demo(settings: Settings, view: PlainView, command: Sequence[str]) -> int:
    """Run the demo with a worker started by ``command``; returns the exit code.

    Raises:
        RedisUnavailable: no server can be reached or started.
        PenstockError: the worker ends before its time; the message has its last words.
        TimeoutError: a stream stands still.
    """
    began = time.monotonic()
    with open_redis(settings.redis) as url:
        view.note("using the configured Redis" if url == settings.redis.url else "started Redis")
        # Started from the main thread, since a worker lives as long as the thread that started it.
        with DemoWorker(command, url, settings) as worker:
            report = asyncio.run(_run(settings, url, worker, view))
        view.finish(report, time.monotonic() - began)
    return 0 if report.all_completed else 1


async def _run(settings: Settings, url: str, worker: DemoWorker, view: PlainView) -> DemoReport:
    async with Producer(url, settings=settings) as producer:
        with view.loading():
            facts = await worker.wait_until_ready()
        view.note(f"worker {facts.worker_id} is ready")
        rows = demo_rows()
        sampler = Sampler(facts.metrics_port)
        await sampler.sample()
        began = time.monotonic()
        serving = asyncio.create_task(_serve(producer, rows, view))
        others = [asyncio.create_task(worker.wait_until_gone()), asyncio.create_task(sampler.run())]
        try:
            with view.streaming(rows):
                await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    await asyncio.gather(*others)  # raises what went wrong
                await serving
        finally:
            await _cancel([serving, *others])
        wall_s = time.monotonic() - began
        await sampler.sample()
    return DemoReport(rows=rows, wall_s=wall_s, engine=sampler.figures())


async def _serve(producer: Producer, rows: Sequence[Row], view: PlainView) -> None:
    """Submit all requests in order and follow their streams; cancel them if we leave early."""
    following: list[asyncio.Task[None]] = []
    try:
        for row in rows:
            submitted = await producer.submit(
                row.prompt, lane=row.lane, tenant=row.tenant, **row.options
            )
            row.id = submitted.id
            following.append(asyncio.create_task(_follow(producer, row, view)))
        await asyncio.gather(*following)
    except BaseException:
        await _cancel(following)
        for row in rows:
            if row.id and row.end is None:
                with contextlib.suppress(PenstockError):
                    await producer.cancel(row.id)
        raise


async def _follow(producer: Producer, row: Row, view: PlainView) -> None:
    async with producer.stream(row.id, timeout=_SILENCE_S) as stream:
        async for chunk in stream:
            row.add(chunk)
        row.end = stream.end
    row.mean_itl_ms = (await producer.status(row.id)).mean_itl_ms
    view.ended(row)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

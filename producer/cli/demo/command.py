"""``penstock demo``: the main job, end to end, on this machine.

A real Redis server, two real workers in their own processes, a dozen requests in three lanes for
two tenants. The batch lane is submitted first, so that one can see urgent work go past it. Then a
worker is killed amid its streams, and a reader leaves and comes back. With a gateway the requests
are sent and read over HTTP, all for the tenant of calls without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

import typer

from penstock.shared.distribution import install_command
from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.local.cores import usable_cores
from penstock.shared.local.embedded import open_redis
from penstock.shared.local.tasks import end_tasks
from penstock.shared.protocol.events import Chunk
from penstock.shared.settings import Settings, load_settings
from penstock.shared.settings.sources import environment_name

from ...client import Producer
from ..local.child import stop_all
from ..local.worker_child import WorkerChild, WorkerFacts, worker_command
from ..options import ConfigOption, JsonOption, RedisOption
from .faults import Absence, check_streams, disturb
from .http_reader import GatewayChild, HttpReader
from .metrics_watch import MetricsWatch
from .summary import DemoReport, FaultFigures, Row, demo_rows
from .view import PlainView, make_view

__all__ = ["demo", "run_demo"]

_SILENCE_S = 30.0
_READY_TIMEOUT_S = 120.0

_KEYLESS_TENANT = "default"
"""The tenant that the gateway charges for calls without a key."""

_MAX_SEQUENCES = {1: 4, 2: 5}
"""Of each of so many workers. Fewer than there are requests: the queue and its lanes have work."""


def demo(
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Checkpoint directory, or demo for the shipped one.")
    ] = "demo",
    faults: Annotated[
        bool,
        typer.Option(
            help="Kill one of two workers amid its streams; --no-faults runs one, undisturbed."
        ),
    ] = True,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Send and read the requests over HTTP.")
    ] = False,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> int:
    """Show the whole pipe at work: a Redis server, two workers, a dozen requests side by side.

    Kills a worker amid the streams (kill -9): they go on at the next token on the other worker.
    Uses REDIS_URL if set, else starts a server for the time of the demo. Nothing is left running.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError(
            f"the demo runs a worker, which needs the package torch: {install_command('worker')}"
        )
    if gateway and importlib.util.find_spec("fastapi") is None:
        raise ConfigurationError(
            f"--gateway: needs the package fastapi: {install_command('gateway')}"
        )
    settings = load_settings({"redis.url": redis, "model.path": model}, config=config)
    command = worker_command(model)
    return run_demo(settings, make_view(json=json), command, faults=faults, gateway=gateway)


def run_demo(
    settings: Settings,
    view: PlainView,
    command: Sequence[str],
    *,
    faults: bool = True,
    gateway: bool = False,
) -> int:
    """Run the demo with workers started by ``command``; returns the exit code.

    Raises:
        RedisUnavailable: no server can be reached or started.
        PenstockError: a worker ends before its time; the message has its last words.
        TimeoutError: a stream stands still.
    """
    began = time.monotonic()
    with open_redis(settings.redis) as url, contextlib.ExitStack() as stack:
        view.note("using the configured Redis" if url == settings.redis.url else "started Redis")
        count = 2 if faults else 1
        given = _worker_settings(settings, url, count)
        # Started from the main thread, since a worker lives as long as the thread that started it.
        workers = [stack.enter_context(WorkerChild(command, given)) for _ in range(count)]
        stack.callback(stop_all, workers)
        http = stack.enter_context(_gateway(settings, url)) if gateway else None
        report = asyncio.run(_run(settings, url, workers, http, view))
        stack.close()
        view.finish(report, time.monotonic() - began)
    return 0 if report.as_promised else 1


def _worker_settings(settings: Settings, url: str, count: int) -> dict[str, object]:
    given: dict[str, object] = {
        "redis.url": url,
        "redis.embedded": "never",
        "queue.model": settings.queue.model,
        "queue.shard": settings.queue.shard,
        "worker.metrics_host": "127.0.0.1",
        "worker.metrics_port": 0,
        "engine.max_sequences": _MAX_SEQUENCES[count],
        "worker.stream_interval_ms": 0,  # so that streams are disturbed between any two tokens
    }
    if settings.model.path == "demo" and settings.engine.kv_memory is None:
        given["engine.kv_memory"] = "64MiB"  # what the requests need; less to prepare at the start
    if count > 1 and settings.engine.threads is None:
        given["engine.threads"] = max(1, usable_cores() // count)
    return given


def _gateway(settings: Settings, url: str) -> GatewayChild:
    given: dict[str, object] = {
        "redis.url": url,
        "redis.embedded": "never",
        "queue.model": settings.queue.model,
        "queue.shard": settings.queue.shard,
        "gateway.host": "127.0.0.1",
        "gateway.processes": 1,
    }
    return GatewayChild(
        os.environ | {environment_name(key): str(value) for key, value in given.items()}
    )


async def _run(
    settings: Settings,
    url: str,
    workers: Sequence[WorkerChild],
    gateway: GatewayChild | None,
    view: PlainView,
) -> DemoReport:
    async with Producer(url, settings=settings) as producer:
        with view.loading():
            facts = await asyncio.gather(*(w.wait_until_serving(_READY_TIMEOUT_S) for w in workers))
        for one in facts:
            view.note(f"worker {one.worker_id} is ready")
        rows = demo_rows()
        http = None
        if gateway is not None:
            http = await gateway.wait_until_serving(settings.queue.model)
            view.note("the gateway is ready: requests and tokens travel over HTTP")
            for row in rows:
                row.tenant = _KEYLESS_TENANT
        watch = MetricsWatch([one.metrics_port for one in facts])
        await watch.sample()
        began = time.monotonic()
        serving = asyncio.create_task(_serve(producer, http, rows, facts, view))
        children = [*workers] if gateway is None else [*workers, gateway]
        others = [asyncio.create_task(child.wait_until_gone()) for child in children]
        others.append(asyncio.create_task(watch.run()))
        try:
            with view.streaming(rows):
                await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    await asyncio.gather(*others)  # raises what went wrong
                faults = await serving
            wall_s = time.monotonic() - began
            await watch.sample()
            if faults is not None:
                view.checking()
                await check_streams(producer, faults, _SILENCE_S)
        finally:
            await end_tasks([serving, *others])
    return DemoReport(rows=rows, wall_s=wall_s, engine=watch.figures(), faults=faults)


async def _serve(
    producer: Producer,
    http: HttpReader | None,
    rows: Sequence[Row],
    workers: Sequence[WorkerFacts],
    view: PlainView,
) -> FaultFigures | None:
    """Submit all requests in order and follow their streams; cancel them if we leave early."""
    readers: list[tuple[Row, Absence]] = []
    tasks: list[asyncio.Task[Any]] = []
    try:
        for row in rows:
            if http is None:
                submitted = await producer.submit(
                    row.prompt, lane=row.lane, tenant=row.tenant, **row.options
                )
                row.id = submitted.id
            readers.append((row, Absence()))
            tasks.append(asyncio.create_task(_follow(producer, http, *readers[-1], view)))
        if len(workers) > 1:
            room = _MAX_SEQUENCES[len(workers)]
            faults = disturb(producer, readers, workers, room, view)
            tasks.append(asyncio.create_task(faults))
        ended = await asyncio.gather(*tasks)
        return ended[-1] if len(workers) > 1 else None
    except BaseException:
        await end_tasks(tasks)
        for row in rows:
            if row.id and row.end is None:
                with contextlib.suppress(PenstockError):
                    await producer.cancel(row.id)
        raise


async def _follow(
    producer: Producer, http: HttpReader | None, row: Row, absence: Absence, view: PlainView
) -> None:
    """Read a stream to its end, with the absence if one is wanted; HTTP sends the request, too."""
    while row.end is None:
        chunks = _chunks(producer, row) if http is None else http.chunks(row)
        async with contextlib.aclosing(chunks):
            while chunk := await asyncio.wait_for(anext(chunks, None), _SILENCE_S):
                row.add(chunk)
                if absence.wanted and not absence.begun:
                    break
            else:
                row.end = (await producer.status(row.id)).end
        if row.end is None:
            absence.begun = True
            await absence.over.wait()
    row.mean_itl_ms = (await producer.status(row.id)).mean_itl_ms
    view.ended(row)


async def _chunks(producer: Producer, row: Row) -> AsyncGenerator[Chunk, None]:
    async with producer.stream(row.id, from_index=row.tokens, from_digest=row.digest) as stream:
        async for chunk in stream:
            yield chunk

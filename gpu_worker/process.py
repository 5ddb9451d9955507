"""The engine process: puts a worker together, runs it, and takes it apart in the right order.

Started by the supervisor with one line of JSON on standard input. Exit codes are the contract
with it: 0 drained; 2 configuration or model refused, do not restart; anything else, restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from redis.asyncio import Redis

from penstock.shared.door_operations import DoorOperations
from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.log_operations import LogOperations
from penstock.shared.operations import Bounds, Operations
from penstock.shared.settings import Settings
from penstock.shared.synthetic import SYNTHETIC

from .compactor import Compactor
from .connection import Link, connect
from .door import Door
from .engine.engine import Engine
from .garbage import calm_collector
from .health import HealthServer
from .intake import Intake
from .launch import EXIT_BROKEN, EXIT_REFUSED, Launch
from .logs import configure_logging
from .metrics import WorkerMetrics
from .outbox import Outbox
from .redis_edge import Capacity, RedisEdge
from .serving import ServingModel
from .synthetic import build_synthetic
from .worker import Worker

__all__ = ["main"]

_log = logging.getLogger("penstock.process")


def main() -> int:
    """Run one worker until it is told to drain, hangs or breaks; returns the exit code."""
    launch = Launch.from_line(sys.stdin.buffer.readline())
    worker = launch.settings.worker
    configure_logging(launch.worker_id, level=worker.log_level, form=worker.log_format)
    try:
        return asyncio.run(_Process(launch).run())
    except PenstockError as error:
        _log.error("%s", error)
        return EXIT_REFUSED


def _build(settings: Settings) -> ServingModel:
    """Load the model. Its packages are imported here, since they take seconds themselves."""
    if settings.model.path == SYNTHETIC:
        return build_synthetic(settings)
    from .model.serving import build_model

    return build_model(settings)


class _Process:
    """One worker's parts and their life."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._settings = launch.settings
        self._metrics = WorkerMetrics()
        self._state = "loading the model"
        self._edge: RedisEdge | None = None
        self._drain = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask_to_drain)
        with self._health() as health:
            model = await asyncio.to_thread(_build, self._settings)
            if self._drain.is_set():
                return 0
            return await self._serve(model, health)

    def _ask_to_drain(self) -> None:
        self._drain.set()
        if self._edge is not None:
            self._edge.stop()

    @contextlib.contextmanager
    def _health(self) -> Iterator[HealthServer | None]:
        port = self._settings.worker.metrics_port
        if port is None:
            yield None
            return
        server = HealthServer(
            self._settings.worker.metrics_host,
            port,
            self._metrics.registry,
            unhealthy=self._unhealthy,
            unready=lambda: self._state or self._unhealthy(),
        )
        try:
            yield server
        finally:
            server.close()

    def _unhealthy(self) -> str | None:
        if self._edge is not None and self._edge.hung:
            return "the engine hangs: its present step has run for too long"
        return None

    async def _serve(self, model: ServingModel, health: HealthServer | None) -> int:
        settings, loop = self._settings, asyncio.get_running_loop()
        wake = asyncio.Event()
        outbox = Outbox(self._metrics, lambda: loop.call_soon_threadsafe(wake.set))
        engine = Engine(model.config, model.new_text_stream)
        worker = Worker(engine, model.runner, outbox, self._metrics)
        timeout = settings.redis.socket_timeout_s
        link, listener = self._link(timeout), self._connect(timeout + 2)
        keys = Keys(settings.queue.model, settings.queue.shard)
        retention_ms = settings.queue.retention_s * 1000
        operations = Operations(link, keys, retention_ms=retention_ms)
        with ThreadPoolExecutor(2, thread_name_prefix="tokenise") as pool:
            intake = Intake(
                model.encode,
                model.compile,
                worker.add,
                outbox,
                self._metrics,
                pool,
                compile_timeout_s=settings.engine.grammar_timeout_s,
            )
            self._edge = edge = RedisEdge(
                listener,
                operations,
                self._launch.worker_id,
                Capacity(
                    max_sequences=settings.engine.max_sequences,
                    claim_batch=settings.worker.claim_batch,
                    lease_ms=settings.worker.lease_ms,
                    heartbeat_ms=settings.worker.heartbeat_interval_ms,
                ),
                worker=worker,
                outbox=outbox,
                intake=intake,
                metrics=self._metrics,
                wake=wake,
                hang_timeout_s=settings.worker.hang_timeout_s,
            )
            door, compactor = self._door(retention_ms, edge), self._compactor(keys)
            worker.start()
            self._announce(model, health)
            if self._drain.is_set():
                edge.stop()
            door.start()
            compactor.start()
            with calm_collector():
                if not await edge.run():
                    return self._abandon(worker)
            await asyncio.gather(door.close(), compactor.close())
            await self._hand_over(worker, edge, intake)
        await link.aclose()
        await listener.aclose()
        return 0

    def _door(self, retention_ms: int, edge: RedisEdge) -> Door:
        settings = self._settings
        # A sweep's interval: entries of a dead worker wait no longer than its requests do.
        interval_s = min(1.0, settings.worker.lease_ms / 3000)
        redis = self._connect(settings.redis.socket_timeout_s + interval_s)
        operations = DoorOperations(
            redis,
            Keys(settings.queue.model, settings.queue.shard),
            retention_ms=retention_ms,
            bounds=Bounds(
                requests=settings.queue.max_queued_requests,
                tokens=settings.queue.max_queued_tokens,
                bytes=int(settings.queue.max_queued_bytes),
                tenant_requests=settings.queue.max_tenant_requests,
            ),
            default_deadline_ms=settings.queue.default_deadline_s * 1000,
        )
        return Door(
            redis,
            operations,
            self._launch.worker_id,
            metrics=self._metrics,
            admitted=edge.expect_work,
            interval_s=interval_s,
        )

    def _compactor(self, keys: Keys) -> Compactor:
        link = self._link(self._settings.redis.socket_timeout_s)
        after_s = self._settings.queue.compact_logs_after_s
        return Compactor(
            link,
            LogOperations(link, keys),
            metrics=self._metrics,
            after_ms=None if after_s is None else after_s * 1000,
        )

    def _link(self, timeout_s: float) -> Link:
        url = self._settings.redis.url
        assert url is not None
        return Link(url, timeout_s=timeout_s)

    def _connect(self, timeout_s: float) -> Redis:
        url = self._settings.redis.url
        assert url is not None
        return connect(url, timeout_s=timeout_s)

    def _announce(self, model: ServingModel, health: HealthServer | None) -> None:
        self._state = ""
        self._metrics.ready.set(1)
        port = health.port if health else None
        _log.info("ready: %s, metrics on port %s", model.summary, port)
        if self._launch.ready_file is not None:
            facts: dict[str, Any] = {"worker_id": self._launch.worker_id, "metrics_port": port}
            whole = self._launch.ready_file.with_suffix(".part")
            whole.write_text(json.dumps(facts))
            whole.rename(self._launch.ready_file)

    async def _hand_over(self, worker: Worker, edge: RedisEdge, intake: Intake) -> None:
        """Drain: stop the engine first, so that what it still says is published, then give back.

        The lease is kept by nobody meanwhile, hence the time limit.
        """
        self._state = "draining"
        self._metrics.ready.set(0)
        timeout = self._settings.worker.drain_timeout_s
        worker.stop()
        await intake.close()
        if not await asyncio.to_thread(worker.join, timeout):
            _log.warning("the present step outlasts the drain; others take over by the lease")
        try:
            released = await asyncio.wait_for(edge.drain(), timeout)
        except (PenstockError, TimeoutError) as error:
            _log.warning("could not hand over (%s); others take over by the lease", error)
        else:
            _log.info("drained: handed over %d requests", released)

    def _abandon(self, worker: Worker) -> int:
        """The engine hangs or broke. Its thread can not be stopped, so the process must end."""
        _log.critical("giving up: %s", worker.failure or "the engine hangs")
        logging.shutdown()
        os._exit(EXIT_BROKEN)


if __name__ == "__main__":
    sys.exit(main())

"""The edge process: the part of a worker that talks to Redis, with the engine process below it.

Puts the parts together, runs them, and takes them apart in the right order. The supervisor starts
it with one line of JSON on standard input. Its argument is the number of the pipe on which it shows
that it lives. Its exit code is the contract with the supervisor: 0, drained; 2, the configuration
or the model is refused, do not restart; anything else, restart. If the engine process dies, this
one ends in the same way, so that the supervisor sees what killed it. It begins in ``__main__``.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.redis.batch_connection import BatchConnection
from penstock.shared.redis.cluster import Route, follow_moved
from penstock.shared.redis.opening import open_client
from penstock.shared.scripts.ingress_operations import IngressOperations
from penstock.shared.scripts.log_operations import LogOperations
from penstock.shared.scripts.operations import Bounds, Operations
from penstock.shared.settings import WorkerSettings

from ..engine_start import StartedEngine
from ..launch import EXIT_BROKEN, EXIT_REFUSED, Launch, stall_limit_s
from ..messages import Ready
from ..monitoring.health import HealthServer
from ..monitoring.heartbeat import HeartbeatWatch, Watchdog
from ..monitoring.logs import configure_logging
from ..monitoring.metrics import WorkerMetrics
from .claim_budget import Capacity
from .claims import ClaimReceiver
from .compactor import Compactor
from .engine_client import EngineClient, EngineEnded
from .ingress import Ingress
from .outbox import Outbox
from .owned_requests import OwnedRequests
from .redis_loop import RedisLoop
from .registration import ModelChangeRefused, register_model

__all__ = ["main"]

_log = logging.getLogger("penstock.process")

_MOST_STEP_PATIENCE_S = 1.0


def main(line: bytes, engine: StartedEngine) -> int:
    """Run one worker until it is told to drain, hangs or breaks; returns the exit code.

    Args:
        line: what the supervisor says, see :class:`.Launch`.
        engine: the process that was told the same.
    """
    launch = Launch.from_line(line)
    worker = launch.settings.worker
    configure_logging(launch.worker_id, level=worker.log_level, form=worker.log_format)
    watch = HeartbeatWatch(stall_limit_s(launch.settings))
    supervisor = int(sys.argv[1]) if len(sys.argv) > 1 else None
    Watchdog(watch, _end_hung, supervisor)
    try:
        return asyncio.run(EdgeProcess(launch, watch, engine).run())
    except EngineEnded as error:
        _log.critical("%s", error)
        _end_like(error.code)
    except PenstockError as error:
        _log.error("%s", error)
        return EXIT_REFUSED


class EdgeProcess:
    """One worker's parts and their life.

    Args:
        launch: what the supervisor says.
        watch: has the heartbeats of all loops.
        engine: the process below this one.
    """

    def __init__(self, launch: Launch, watch: HeartbeatWatch, engine: StartedEngine) -> None:
        self._launch = launch
        self._started = engine
        self._settings = launch.settings
        self._watch = watch
        self._metrics = WorkerMetrics()
        self._owned = OwnedRequests()
        self._state = "loading the model"
        self._redis_loop: RedisLoop | None = None
        self._drain = asyncio.Event()
        self._route = Route()

    async def run(self) -> int:
        """Load the model, serve until told to drain, and hand over; returns the exit code.

        Raises:
            EngineEnded: the engine process died while it loaded.
            PenstockError: model or settings are refused.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask_to_drain)
        wake = asyncio.Event()
        outbox = Outbox(self._owned, self._metrics, wake.set)
        engine = EngineClient(self._owned, outbox, self._metrics, wake.set, self._watch)
        try:
            with self._health() as health:
                ready = await self._load(engine)
                if ready is None:
                    _log.info("drained: the model was still being loaded")
                else:
                    await self._serve_or_end(engine, outbox, wake, ready, health)
            return 0
        except EngineEnded:
            raise EngineEnded(await engine.exit_code()) from None
        finally:
            engine.kill()

    async def _load(self, engine: EngineClient) -> Ready | None:
        """Have the model loaded; what the engine says then, or None if a drain was asked for."""
        loading = asyncio.create_task(engine.start(self._launch, self._started))
        drain = asyncio.create_task(self._drain.wait())
        await asyncio.wait({loading, drain}, return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
        if loading.done():
            return loading.result()
        loading.cancel()
        return None

    def _ask_to_drain(self) -> None:
        self._drain.set()
        if self._redis_loop is not None:
            self._redis_loop.stop()

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
            beat=self._watch.add("the metrics server").beat,
        )
        try:
            yield server
        finally:
            server.close()

    def _unhealthy(self) -> str | None:
        if (problem := self._watch.problem) is not None:
            return problem
        if self._redis_loop is not None and self._redis_loop.engine_failure is not None:
            return f"the engine broke: {self._redis_loop.engine_failure}"
        return None

    async def _serve_or_end(
        self,
        engine: EngineClient,
        outbox: Outbox,
        wake: asyncio.Event,
        ready: Ready,
        health: HealthServer | None,
    ) -> None:
        """Serve; an error ends the process here and now.

        It is no refusal, whatever its class. And to let it rise would be to wait for the end of
        tasks, some of which may not end.
        """
        try:
            await self._serve(engine, outbox, wake, ready, health)
        except ModelChangeRefused:
            raise  # before any task began
        except BaseException:
            _log.critical("a bug ended the edge process", exc_info=True)
            _end_like(EXIT_BROKEN)

    async def _serve(
        self,
        engine: EngineClient,
        outbox: Outbox,
        wake: asyncio.Event,
        ready: Ready,
        health: HealthServer | None,
    ) -> None:
        settings = self._settings
        timeout = settings.redis.socket_timeout_s
        connection, listener = self._batch_connection(timeout), self._open_client(timeout + 2)
        keys = Keys(settings.queue.model, settings.queue.shard)
        # Finds the node of a cluster for all connections; if it fails, they find it themselves.
        with contextlib.suppress(RedisError, OSError):
            await follow_moved(lambda: listener.exists(keys.counters))
        operations = Operations(
            connection,
            keys,
            retention_ms=settings.queue.retention_ms,
            fingerprint=ready.fingerprint,
            usage_retention_ms=settings.queue.usage_retention_ms,
        )
        await register_model(operations, ready, settings.worker, self._drain)
        self._redis_loop = redis_loop = RedisLoop(
            listener,
            operations,
            self._launch.worker_id,
            Capacity.of(settings, ready.kind),
            engine=engine,
            owned=self._owned,
            outbox=outbox,
            claims=ClaimReceiver(
                engine.add, engine.abort, self._owned, outbox, self._metrics, ready.kind
            ),
            metrics=self._metrics,
            watch=self._watch,
            wake=wake,
            drain_timeout_s=settings.worker.drain_timeout_s,
        )
        ingress, compactor = self._ingress(redis_loop), self._compactor(keys)
        self._announce(ready, health)
        if self._drain.is_set():
            redis_loop.stop()
        ingress.start()
        compactor.start()
        with calm_collector():
            if not await redis_loop.run():
                await self._abandon(engine)
        # What others need to go on comes first; entries at hand in the ingress, others find.
        closing = asyncio.gather(ingress.close(), compactor.close())
        await self._hand_over(engine, redis_loop)
        await closing
        await connection.aclose()
        await listener.aclose()

    def _ingress(self, redis_loop: RedisLoop) -> Ingress:
        settings = self._settings
        # A sweep's interval: entries of a dead worker wait no longer than its requests do.
        interval_s = min(1.0, settings.worker.lease_ms / 3000)
        redis = self._open_client(settings.redis.socket_timeout_s + interval_s)
        operations = IngressOperations(
            redis,
            Keys(settings.queue.model, settings.queue.shard),
            retention_ms=settings.queue.retention_ms,
            bounds=Bounds.of(settings.queue),
            default_deadline_ms=settings.queue.default_deadline_ms,
        )
        return Ingress(
            redis,
            operations,
            self._launch.worker_id,
            metrics=self._metrics,
            watch=self._watch,
            admitted=redis_loop.expect_work,
            interval_s=interval_s,
        )

    def _compactor(self, keys: Keys) -> Compactor:
        connection = self._batch_connection(self._settings.redis.socket_timeout_s)
        after_s = self._settings.queue.compact_logs_after_s
        return Compactor(
            connection,
            LogOperations(connection, keys),
            metrics=self._metrics,
            watch=self._watch,
            after_ms=None if after_s is None else after_s * 1000,
        )

    def _batch_connection(self, timeout_s: float) -> BatchConnection:
        url = self._settings.redis.url
        assert url is not None
        return BatchConnection(url, timeout_s=timeout_s, route=self._route)

    def _open_client(self, timeout_s: float) -> Redis:
        url = self._settings.redis.url
        assert url is not None
        return open_client(url, timeout_s=timeout_s, route=self._route)

    def _announce(self, ready: Ready, health: HealthServer | None) -> None:
        self._state = ""
        self._metrics.ready.set(1)
        port = health.port if health else None
        _log.info(
            "ready: %s, fingerprint %s, metrics on port %s", ready.summary, ready.fingerprint, port
        )
        if self._launch.ready_file is not None:
            facts: dict[str, Any] = {
                "worker_id": self._launch.worker_id,
                "pid": os.getpid(),
                "metrics_port": port,
            }
            whole = self._launch.ready_file.with_suffix(".part")
            whole.write_text(json.dumps(facts))
            whole.rename(self._launch.ready_file)

    async def _hand_over(self, engine: EngineClient, redis_loop: RedisLoop) -> None:
        """Drain: stop the engine, publish its last tokens, then give the requests back.

        A step that takes too long is cut short: the engine is killed, and others repeat the step.
        """
        self._state = "draining"
        self._metrics.ready.set(0)
        if not await engine.stop(_step_patience_s(self._settings.worker)):
            _log.warning("the present step takes too long for a drain; others begin it anew")
        try:
            released = await redis_loop.drain()
        except PenstockError as error:
            _log.warning("could not hand over (%s); others take over by the lease", error)
        else:
            _log.info("drained: handed over %d requests", released)

    async def _abandon(self, engine: EngineClient) -> NoReturn:
        """The engine broke or died: end, so that the supervisor gives the requests back."""
        _log.critical("giving up: %s", engine.failure)
        _end_like(await engine.exit_code())


def _step_patience_s(worker: WorkerSettings) -> float:
    """How long a drain waits for the step that runs, in seconds.

    Nothing renews the lease meanwhile, and its last renewal is at most a heartbeat ago. A drain
    waits for half of the rest: if the lease ended, the requests would be blamed.
    """
    left_ms = worker.lease_ms - worker.heartbeat_interval_ms
    return min(_MOST_STEP_PATIENCE_S, left_ms / 2000)


def _end_hung(problem: str) -> NoReturn:
    """End because a loop stands still. The engine process ends with this one.

    Called on a thread of its own: the event loop may be what hangs, and the lock of a log handler
    with it.
    """
    os.write(2, f"penstock: giving up: {problem}\n".encode())
    faulthandler.dump_traceback(2)
    os._exit(EXIT_BROKEN)


def _end_like(code: int) -> NoReturn:
    """End as the engine process did: by the same signal or with its exit code.

    At once. To close an event loop in order is to wait for its tasks, and some outlive their
    cancellation: redis-py sends within ``asyncio.wait_for``, which Python 3.11 may lose one in.

    An engine that refuses says so in words. One that just ended with the same code broke.
    """
    logging.shutdown()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code > 0 and code != EXIT_REFUSED else EXIT_BROKEN)

"""``penstock serve``: one command, as other servers have it.

Redis starts first, then workers and gateway side by side. They end in the other order. The gateway
stops admission and lets its answers end, the workers return running requests to the queue, and
Redis stops last. So nothing accepted is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import ssl
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.shared.distribution import install_command
from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.local.cores import usable_cores
from penstock.shared.local.embedded import EmbeddedRedis, resolve_url
from penstock.shared.protocol.states import ModelKind
from penstock.shared.settings import Settings, environment_name, load_settings
from penstock.shared.settings.model_name import with_model_name
from penstock.shared.synthetic import SYNTHETIC

from ...client import Producer
from ..local.child import Child, stop_all
from ..local.worker_child import WorkerChild, worker_command
from ..options import ConfigOption, RedisOption
from .data_directory import default_directory, owned
from .screen import Screen

__all__ = ["serve"]

_GATEWAY_START_S = 60.0
_POLL_S = 0.05
_SPEAKS = "gateway: "
"""How the line begins in which a gateway says its address."""


def serve(
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Checkpoint directory, or demo for the shipped one.")
    ] = "demo",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers to start.")] = 1,
    processes: Annotated[
        int | None, typer.Option(help="Processes of the gateway, which share its port; default: 1.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name the model is served under; default: its directory's."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the HTTP API; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Its port; default: 8000. 0 takes a free one.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Where a Redis server that is started here keeps its data; default: "
            "~/.local/share/penstock/redis."
        ),
    ] = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> int:
    """Serve a model over OpenAI's HTTP API: Redis, workers and gateway by one command.

    Uses REDIS_URL if set, else starts a Redis server that keeps its data. Ctrl-C drains: answers
    that are under way end first. A second Ctrl-C ends everything at once.
    """
    flags = {
        "model.path": model, "queue.model": name, "redis.url": redis, "gateway.host": host,
        "gateway.port": port, "gateway.processes": processes, "redis.embedded_dir": data,
    }  # fmt: skip
    settings = with_model_name(load_settings(flags, config=config))
    _require_packages(settings)
    screen = Screen()
    with _open_redis(settings, screen) as url:
        return asyncio.run(_Deployment(settings, url, workers, screen, config).run())


class _Deployment:
    """Workers and gateway beside this process.

    Args:
        settings: the whole tree.
        url: address of Redis.
        workers: how many.
        screen: is told.
        config: the settings file that was named, which the children read, too.
    """

    def __init__(
        self, settings: Settings, url: str, workers: int, screen: Screen, config: Path | None
    ) -> None:
        self._settings = settings
        self._url = url
        self._screen = screen
        self._stop = asyncio.Event()
        self._base_url = ""
        self._has_keys = False
        given: dict[str, object] = {
            "redis.url": url,
            "redis.embedded": "never",
            "queue.model": settings.queue.model,
            "queue.shard": settings.queue.shard,
        }
        if config is not None:
            given["config"] = config.absolute()  # as PENSTOCK_CONFIG
        self._workers = [
            WorkerChild(
                worker_command(settings.model.path),
                given | _worker_settings(settings, workers),
                screen.line,
            )
            for _ in range(workers)
        ]
        gateway = given | {
            "gateway.host": settings.gateway.host,
            "gateway.port": settings.gateway.port,
            "gateway.processes": settings.gateway.processes,
        }
        environment = {environment_name(key): str(value) for key, value in gateway.items()}
        self._gateway = Child(
            "gateway",
            [sys.executable, "-m", "penstock.producer.cli", "gateway"],
            os.environ | environment,
            self._hear_gateway,
            ready_file=False,
        )

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code.

        Raises:
            PenstockError: a child ended before its time; the others were ended in order.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ask_to_stop)
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            for child in (*self._workers, self._gateway):
                stack.enter_context(child)
            serving = asyncio.create_task(self._serve(began))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                serving.cancel()
                stopping.cancel()
                await self._close()
            if serving.done() and not serving.cancelled():
                await serving  # raises what went wrong
        return 0

    async def _serve(self, began: float) -> None:
        """Wait until all serve, say so, and watch them."""
        children = (*self._workers, self._gateway)
        watching = asyncio.gather(*(child.wait_until_gone() for child in children))
        ready = asyncio.gather(
            self._reach_gateway(), *(w.wait_until_ready() for w in self._workers)
        )
        try:
            with self._screen.loading(self._settings.queue.model):
                await asyncio.wait({ready, watching}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await ready
                seconds, count = time.monotonic() - began, len(self._workers)
                model, kind = self._settings.queue.model, await self._kind()
                self._screen.ready(
                    self._base_url, model, kind, self._url, count, seconds, self._has_keys
                )
            await watching
        finally:
            ready.cancel()
            watching.cancel()
            await asyncio.gather(ready, watching, return_exceptions=True)

    async def _kind(self) -> ModelKind:
        """What the model does with a request."""
        name = self._settings.queue.model
        async with Producer(self._url, model=name, settings=self._settings) as producer:
            return (await producer.model_card(vocabulary=False)).kind

    async def _reach_gateway(self) -> None:
        """Wait until the gateway answers, and for our model.

        Raises:
            PenstockError: it does not answer within a minute.
        """
        deadline = time.monotonic() + _GATEWAY_START_S
        while True:
            if self._base_url and self._settings.gateway.tls_client_ca is not None:
                return  # it answers who has a certificate; that it listens must do
            if self._base_url:
                health = self._base_url.removesuffix("/v1") + "/health"
                with contextlib.suppress(OSError):
                    if self._settings.queue.model in await asyncio.to_thread(_served, health):
                        return
                    deadline = max(deadline, time.monotonic() + 1)  # the model loads
            if time.monotonic() > deadline:
                last = self._gateway.last_line
                raise PenstockError(f"the gateway does not answer; it last said: {last}")
            await asyncio.sleep(_POLL_S)

    def _hear_gateway(self, line: str) -> None:
        if line.startswith(_SPEAKS) and not self._base_url:
            self._base_url, _, about = line.removeprefix(_SPEAKS).partition(" ")
            self._has_keys = about.startswith("(API keys")
        else:
            self._screen.line(line)

    def _ask_to_stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        for child in (*self._workers, self._gateway):
            child.kill()

    async def _close(self) -> None:
        """Admission ends first, then what runs is handed over; Redis ends behind us."""
        self._screen.note("draining: the gateway ends its answers; Ctrl-C again ends at once")
        self._gateway.terminate()
        await asyncio.to_thread(self._gateway.wait, self._settings.gateway.drain_timeout_s + 10)
        await asyncio.to_thread(stop_all, self._workers)


def _worker_settings(settings: Settings, count: int) -> dict[str, object]:
    given: dict[str, object] = {}
    if count > 1 or "metrics_port" not in settings.worker.model_fields_set:
        given["worker.metrics_port"] = 0  # several workers cannot share one
    if count > 1 and settings.engine.threads is None:
        given["engine.threads"] = max(1, usable_cores() // count)
    return given


@contextlib.contextmanager
def _open_redis(settings: Settings, screen: Screen) -> Iterator[str]:
    """The configured server, or one of our own that keeps its data.

    Raises:
        RedisUnavailable: none is configured and none can be started.
        ConfigurationError: its data directory cannot be used.
    """
    url = resolve_url(settings.redis)
    if url is not None:
        yield url
        return
    wanted = settings.redis.embedded_dir or default_directory()
    with owned(wanted) as directory, EmbeddedRedis(data_dir=directory) as server:
        screen.note(f"started Redis {server.binary.version}; its data is in {directory}")
        yield server.url


def _require_packages(settings: Settings) -> None:
    """Say at once what is missing, rather than let children fail.

    Raises:
        ConfigurationError: the extras that workers and gateway need are not installed.
    """
    needed = {"fastapi": "gateway", "uvicorn": "gateway", "prometheus_client": "worker"}
    if settings.model.path != SYNTHETIC:
        needed |= {"torch": "worker", "transformers": "worker"}
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"penstock serve needs the package {package}: {install_command(extra)}"
            )


def _served(health: str) -> dict[str, int]:
    """The models that our own gateway finds, and their workers."""
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate is for other names than this address
    context.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(health, timeout=5, context=context) as reply:
        models: dict[str, int] = json.load(reply)["models"]
        return models

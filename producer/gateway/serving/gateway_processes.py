"""Runs the gateway: in this process, or in several children that share one listening socket.

Children inherit the socket, so no connection waits at a child that has died. One that dies is
started again. All end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from prometheus_client.multiprocess import mark_process_dead

from penstock.shared.errors import ConfigurationError
from penstock.shared.local.children import spawn_bound
from penstock.shared.settings import Settings

from ..access.addresses import is_loopback
from .http_server import GatewayServer
from .tls import tls_arguments
from .waiting_server import reach_redis

__all__ = ["run_child", "serve"]

_log = logging.getLogger("penstock.gateway")

_POLL_S = 0.2
_LEAST_LIFE_S = 1.0
"""A child that ends sooner is started again only after that time."""


def serve(settings: Settings, announce: Callable[[str, bool], None]) -> None:
    """Serve until SIGTERM or SIGINT; returns when everything is closed.

    While Redis cannot be reached it waits, and answers 503.

    Args:
        settings: the whole tree.
        announce: called with the address, and whether there are API keys, once connections are
            accepted.

    Raises:
        ConfigurationError: the address or TLS cannot be used, or the address is open to others
            without API keys.
        RedisUnavailable: Redis refuses access, or is none that can be used.
    """
    gateway = settings.gateway
    tls = tls_arguments(gateway)
    _raise_file_limit()
    with _listen(gateway.host, gateway.port) as listener:
        has_keys = reach_redis(settings, listener)
        if has_keys is None:
            return
        _check_address(gateway.host, has_keys)
        host, port = listener.getsockname()[:2]
        scheme = "https" if tls else "http"
        shown = f"[{host}]" if ":" in host else host
        announce(f"{scheme}://{shown}:{port}/v1", has_keys)
        if gateway.processes == 1:
            if not GatewayServer(settings).serve_on(listener):
                raise ConfigurationError("the gateway could not start; its log says why")
            return
        with tempfile.TemporaryDirectory(prefix="penstock-gateway-") as folder:
            _Children(settings, listener, folder).run(gateway.processes)


def run_child(settings: Settings, descriptor: int) -> bool:
    """Serve as one of several processes on an inherited socket; whether it could start."""
    with socket.socket(fileno=descriptor) as listener:
        if reach_redis(settings, listener) is None:
            return True  # told to end while it waited
        return GatewayServer(settings).serve_on(listener)


class _Children:
    """The processes of a gateway.

    Args:
        settings: what they are told on standard input.
        listener: the socket they share.
        folder: where they keep what ``/metrics`` adds up.
    """

    def __init__(self, settings: Settings, listener: socket.socket, folder: str) -> None:
        self._settings = settings.model_dump_json().encode()
        self._listener = listener
        self._folder = folder
        self._environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": folder}
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []
        self._stopping = False

    def run(self, count: int) -> None:
        with self._signals():
            while not self._stopping:
                self._running = [(p, t) for p, t in self._running if self._is_alive(p, t)]
                while len(self._running) < count and not self._stopping:
                    self._running.append((self._start(), time.monotonic()))
                time.sleep(_POLL_S)
        for process, _ in self._running:
            process.terminate()
        for process, _ in self._running:
            process.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _is_alive(self, process: subprocess.Popen[bytes], started: float) -> bool:
        code = process.poll()
        if code is None:
            return True
        _log.error("a gateway process ended with exit code %d; another one starts", code)
        mark_process_dead(process.pid, self._folder)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, started + _LEAST_LIFE_S - time.monotonic()))
        return False

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        process = spawn_bound(
            [sys.executable, "-m", "penstock.producer.gateway.serving", str(descriptor)],
            stdin=subprocess.PIPE,
            env=self._environment,
            pass_fds=(descriptor,),
            new_session=True,  # Ctrl-C reaches the parent alone
        )
        assert process.stdin is not None
        process.stdin.write(self._settings)
        process.stdin.close()
        return process


def _raise_file_limit() -> None:
    """A connection is an open file: let there be as many as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check_address(host: str, has_keys: bool) -> None:
    """Without API keys anybody who reaches the port may use everything.

    Raises:
        ConfigurationError: there are none, and others than this machine could reach it.
    """
    if not has_keys and not is_loopback(host):
        raise ConfigurationError(
            f"gateway.host is {host!r}, but there are no API keys: without them the gateway "
            "listens on a loopback address only; `penstock keys create` makes one"
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener

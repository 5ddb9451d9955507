"""``/metrics``, ``/healthz`` and ``/readyz`` of one worker, served from a thread of their own.

A thread of its own answers in time beside a hung event loop or a long step. The worker is healthy
if all of its loops beat recently, not if this thread answers.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from penstock.shared.errors import ConfigurationError

__all__ = ["HealthServer"]

_log = logging.getLogger("penstock.health")

_POLL_S = 0.05

_CLIENT_TIMEOUT_S = 10
"""A client that connects and says nothing costs its thread no longer than this."""


class HealthServer:
    """Serves until closed.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        registry: what ``/metrics`` shows.
        unhealthy: why the worker should be replaced, or None if it is healthy (``/healthz``).
        unready: why it takes no work now, or None if it does (``/readyz``).
        beat: called several times a second by the serving thread.

    Raises:
        ConfigurationError: the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        unhealthy: Callable[[], str | None],
        unready: Callable[[], str | None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def service_actions(self) -> None:
                beat()

        class Handler(BaseHTTPRequestHandler):
            timeout = _CLIENT_TIMEOUT_S

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    try:
                        text = generate_latest(registry)
                    except Exception:
                        _log.exception("metrics cannot be shown")
                        self._answer(500, b"see the log\n", "text/plain")
                    else:
                        self._answer(200, text, CONTENT_TYPE_LATEST)
                elif self.path in ("/healthz", "/readyz"):
                    problem = unhealthy() if self.path == "/healthz" else unready()
                    body = (problem or "ok") + "\n"
                    self._answer(503 if problem else 200, body.encode(), "text/plain")
                else:
                    self._answer(404, b"try /metrics, /healthz or /readyz\n", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes every few seconds are no news."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            setting, remedy = "host", "an address of this machine, or 0.0.0.0"
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                setting, remedy = "port", "another port, 0 for any free one, or off"
            raise ConfigurationError(
                f"worker.metrics_{setting}: cannot listen on {host}:{port} ({error.strerror}); "
                f"give {remedy}"
            ) from None
        self._thread = threading.Thread(
            # How often it looks whether it is to end, which a drain waits for.
            target=lambda: self._server.serve_forever(poll_interval=_POLL_S),
            name="health",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

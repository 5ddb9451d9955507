"""One process of the gateway: uvicorn with httptools and uvloop, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.settings import GatewaySettings, Settings

from ..application import create_app
from .guarded_protocol import guarded_protocol
from .tls import tls_arguments

__all__ = ["GatewayServer", "HttpServer"]

_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {"penstock.gateway": {"level": "INFO"}},
}

_LAST_WORDS_S = 2
"""How long the streams that a drain ends may take to say so."""


class HttpServer(uvicorn.Server):
    """Serves an app on a socket that listens already, until SIGTERM or SIGINT.

    Args:
        app: the app.
        options: the section ``gateway``.
        lifespan: the app wants to hear of its life.
        on_refused: told the ``code`` of each request that is refused before the app sees it.

    Raises:
        ConfigurationError: see :func:`.tls_arguments`.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: GatewaySettings,
        *,
        lifespan: bool,
        on_refused: Callable[[str], object],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(options.body_timeout_s, on_refused),
                loop="uvloop",
                ws="none",
                lifespan="on" if lifespan else "off",
                log_config=_LOGGING,
                access_log=False,
                proxy_headers=False,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(options.drain_timeout_s) + 2 * _LAST_WORDS_S,
                **tls_arguments(options),
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept nothing more; a second signal ends at once.

        uvicorn's own would raise the signal again at the end, and a drain is no failure.
        """
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True

    def serve_on(self, listener: socket.socket) -> bool:
        """Serve until a signal; returns whether it could start. The socket stays open."""
        with calm_collector():
            self.run(sockets=[listener.dup()])  # which uvicorn closes
        return self.started


class GatewayServer(HttpServer):
    """Serves the gateway's app.

    After SIGTERM or SIGINT it lets answers end for ``gateway.drain_timeout_s``, and then tells the
    streams that are left where to resume.

    Args:
        settings: the whole tree.

    Raises:
        ConfigurationError: see :func:`.tls_arguments`.
    """

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings)
        count = app.gateway.metrics.count_refused_head
        super().__init__(app, settings.gateway, lifespan=True, on_refused=count)
        self._gateway = app.gateway
        self._drain_s = settings.gateway.drain_timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends at once."""
        super().handle_exit(sig, frame)
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain_s, self._gateway.end_streams)

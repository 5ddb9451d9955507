"""Before Redis answers: the gateway listens, says what it waits for, and tries again.

A server that cannot be reached or still loads its data is waited for: it may be started after the
gateway. Whatever else it answers ends the gateway, since another try would meet the same.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.shared.errors import RedisUnavailable
from penstock.shared.settings import Settings

from ..access.key_access import are_keys
from ..api_errors import ApiError, error_response
from ..model_directory import ModelDirectory
from ..pages.service_pages import redis_away
from .http_server import HttpServer

__all__ = ["reach_redis"]

_log = logging.getLogger("penstock.gateway")

_PAUSES_S = (0.1, 0.2, 0.5, 1.0)


def reach_redis(settings: Settings, listener: socket.socket) -> bool | None:
    """Reach Redis, waiting for it if need be; meanwhile every request gets 503.

    Args:
        settings: the whole tree.
        listener: the socket that listens already; it stays open.

    Returns:
        Whether there are API keys; None if a signal ended the waiting.

    Raises:
        ConfigurationError: TLS cannot be used.
        RedisUnavailable: the server refuses access, or cannot be used.
    """
    try:
        return asyncio.run(_try_redis(settings))
    except RedisUnavailable as error:
        if not error.outage:
            raise
        return WaitingServer(settings, error).wait_on(listener)


class WaitingServer(HttpServer):
    """Answers 503 until Redis can be used, cannot be, or a signal comes.

    Args:
        settings: the whole tree.
        error: why it could not be used so far.
    """

    def __init__(self, settings: Settings, error: RedisUnavailable) -> None:
        self._page = _AwayPage(error)
        super().__init__(
            self._page,
            settings.gateway,
            lifespan=False,
            on_refused=lambda _: None,  # there are no metrics before Redis answers
        )
        self._settings = settings
        self._has_keys: bool | None = None

    def wait_on(self, listener: socket.socket) -> bool | None:
        """See :func:`reach_redis`."""
        _log.warning("%s; the gateway waits for it, and answers 503", self._page.error)
        self.serve_on(listener)
        if not self._page.error.outage:
            raise self._page.error
        if self._has_keys is not None:
            _log.info("Redis answers; the gateway serves")
        return self._has_keys

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve beside the attempts."""
        attempts = asyncio.create_task(self._try_again())
        try:
            await super().serve(sockets)
        finally:
            attempts.cancel()
            await asyncio.wait([attempts])

    async def _try_again(self) -> None:
        number = 0
        while self._has_keys is None and self._page.error.outage:
            await asyncio.sleep(_PAUSES_S[min(number, len(_PAUSES_S) - 1)])
            number += 1
            try:
                self._has_keys = await _try_redis(self._settings)
            except RedisUnavailable as error:
                self._page.error = error
        self.should_exit = True


class _AwayPage:
    """The app meanwhile: 503 for every request.

    Attributes:
        error: why Redis could not be used so far.
    """

    def __init__(self, error: RedisUnavailable) -> None:
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        if scope["path"] == "/health":
            response = JSONResponse(redis_away(self.error), status_code=503)
        else:
            message = f"the gateway waits for Redis: {self.error.outage}"
            response = error_response(ApiError(503, message, "queue_unavailable", retry_after_s=2))
        response.headers["x-request-id"] = f"req-{uuid.uuid4().hex}"
        await response(scope, receive, send)


async def _try_redis(settings: Settings) -> bool:
    """Whether there are API keys.

    Raises:
        RedisUnavailable: Redis cannot be used, or not now.
    """
    directory = ModelDirectory(settings)
    try:
        await directory.connect()
    finally:
        await directory.aclose()
    return await are_keys(settings)

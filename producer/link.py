"""The client's connections to Redis: opened, checked, retried, and named in errors.

Everything the client sends may be sent twice without harm: reads are reads, a submit is
idempotent by its id, a cancel of what has ended changes nothing. So a broken connection is
repaired by trying again, until an outage has lasted too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import ConfigurationError, RedisUnavailable

__all__ = ["Link"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_PAUSE_S = (0.02, 0.5)
_CONNECTIONS = 8


class Link:
    """A Redis client, and how failures of it are met.

    At most eight commands are under way at once, so that a thousand streams that all read their
    log after a reconnection do not open a thousand connections.

    Args:
        redis: a client of the caller's, which stays the caller's to close; or a URL.
        socket_timeout_s: for a client made from a URL: bound on connecting and on each reply.
        outage_s: how long commands are tried again while the server cannot be reached.

    Raises:
        ConfigurationError: the URL is not one, or the client decodes responses.
    """

    def __init__(
        self, redis: Redis | str, *, socket_timeout_s: float = 5.0, outage_s: float = 10.0
    ) -> None:
        self._owned = isinstance(redis, str)
        self.redis = _open(redis, socket_timeout_s) if isinstance(redis, str) else redis
        self.outage_s = outage_s
        parameters = self.redis.connection_pool.connection_kwargs
        if parameters.get("decode_responses"):
            raise ConfigurationError(
                "the Redis client decodes responses, but penstock's payloads are binary; "
                "make it without decode_responses"
            )
        self._places = asyncio.Semaphore(_CONNECTIONS)

    @property
    def address(self) -> str:
        """The server's address without its password."""
        at = self.redis.connection_pool.connection_kwargs
        if "path" in at:
            return f"unix://{at['path']}"
        return f"redis://{at.get('host', 'localhost')}:{at.get('port', 6379)}/{at.get('db', 0)}"

    async def connect(self) -> None:
        """Reach the server once and look at its version; nothing is tried again.

        Raises:
            RedisUnavailable: not reachable, access refused, or too old.
        """
        from penstock.shared.embedded import check_server

        try:
            facts = await self._attempt(lambda: self.redis.info("server"))
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        except NoPermissionError:
            _log.info("the server's version is not checked: its user may not run INFO")
            return
        except ResponseError as error:
            raise RedisUnavailable(f"Redis at {self.address} refuses INFO: {error}") from error
        check_server(str(facts["redis_version"]))

    async def call(self, send: Callable[[], Awaitable[_T]]) -> _T:
        """Run a repeatable command; on a broken connection run it again.

        Raises:
            RedisUnavailable: the server could not be reached for ``outage_s`` seconds, refuses
                access, or refuses the command.
        """
        loop = asyncio.get_running_loop()
        pause_s, longest_pause_s = _PAUSE_S
        broken_since: float | None = None
        while True:
            try:
                return await self._attempt(send)
            except AuthenticationError as error:
                raise self._unreachable(error) from error
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                broken_since = loop.time() if broken_since is None else broken_since
                if loop.time() + pause_s - broken_since > self.outage_s:
                    raise self._unreachable(error) from error
                _log.info("Redis at %s: %s; trying again", self.address, error)
            except RedisError as error:
                raise RedisUnavailable(
                    f"Redis at {self.address} refused a command: {error}"
                ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)

    async def _attempt(self, send: Callable[[], Awaitable[_T]]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        async with self._places:
            cancelled_before = task.cancelling()
            reply = await send()
        # redis-py sends within asyncio.wait_for, which in Python 3.11 swallows a cancellation
        # that comes just when the sending is done: the caller would go on for ever.
        if task.cancelling() > cancelled_before:
            raise asyncio.CancelledError
        return reply

    async def aclose(self) -> None:
        """Close the connections, if they are our own."""
        if self._owned:
            await self.redis.aclose()

    def _unreachable(self, error: Exception) -> RedisUnavailable:
        if isinstance(error, AuthenticationError):
            return RedisUnavailable(
                f"Redis at {self.address} refuses access: {error}; "
                "check user and password in REDIS_URL"
            )
        reason = str(error) or type(error).__name__
        return RedisUnavailable(
            f"cannot reach Redis at {self.address}: {reason}; "
            "start the server, or set REDIS_URL or --redis to its address"
        )


def _open(url: str, socket_timeout_s: float) -> Redis:
    try:
        redis: Redis = Redis.from_url(
            url,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            # Retried here, so that every kind of connection and error is met the same way.
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigurationError(
            f"the Redis address is not one: {error}; "
            "it must be redis://host:port/db, rediss://host:port/db or unix:///path"
        ) from None
    return redis

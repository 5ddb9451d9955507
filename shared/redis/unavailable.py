"""The error texts for a server that cannot be used, each with its remedy."""

from __future__ import annotations

import ssl

from redis.asyncio import SSLConnection
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import AuthenticationError, BusyLoadingError, InvalidResponse, ResponseError

from ..errors import RedisUnavailable
from .transient_errors import TransientRefusal

__all__ = ["describe_address", "not_redis", "refused_command", "unavailable"]


def describe_address(pool: ConnectionPool) -> str:
    """The address that a pool connects to, without user and password."""
    at = pool.connection_kwargs
    if "path" in at:
        return f"unix://{at['path']}"
    scheme = "rediss" if _uses_tls(pool) else "redis"
    return f"{scheme}://{at.get('host', 'localhost')}:{at.get('port', 6379)}/{at.get('db', 0)}"


def unavailable(error: Exception, pool: ConnectionPool) -> RedisUnavailable:
    """Describe why a server cannot be used.

    Args:
        error: what redis-py or the operating system raised while connecting or during a command.
        pool: of the client that raised it.
    """
    server = f"Redis at {describe_address(pool)}"
    reason = str(error) or type(error).__name__
    if isinstance(error, InvalidResponse):
        return not_redis(reason, pool)
    if isinstance(error, AuthenticationError):
        return RedisUnavailable(
            f"{server} refuses access: {reason}; check user and password in REDIS_URL or --redis"
        )
    if isinstance(error, TransientRefusal | BusyLoadingError):
        remedy = (
            "point REDIS_URL or --redis to its primary"
            if "read only replica" in reason
            else "wait until it does, and look at its log"
        )
        text = f"{server} answers but serves no requests now: {reason}; {remedy}"
        return RedisUnavailable(text, outage=f"it serves no requests now: {reason}")
    if isinstance(error, ResponseError):
        return RedisUnavailable(
            f"{server} refuses the connection: {reason}; "
            "check database and user in REDIS_URL or --redis"
        )
    tls = ", which must be redis:// unless it speaks TLS on that port" if _uses_tls(pool) else ""
    return RedisUnavailable(
        f"cannot reach {server}: {reason}; start the server, "
        f"or set REDIS_URL or --redis to its address{tls}",
        outage="" if _is_refused_by_tls(error) else "it cannot be reached",
    )


def _is_refused_by_tls(error: BaseException | None) -> bool:
    """Whether the two sides disagree on TLS: a certificate, or whether to speak it at all."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        error = error.__cause__ or error.__context__
    return False


def refused_command(error: Exception, pool: ConnectionPool) -> RedisUnavailable:
    """The server answers and refuses a command for good."""
    return RedisUnavailable(f"Redis at {describe_address(pool)} refused a command: {error}")


def not_redis(reason: str, pool: ConnectionPool) -> RedisUnavailable:
    """Something else than Redis answers at the address."""
    shown = reason if len(reason) <= 80 else reason[:77] + "..."
    return RedisUnavailable(
        f"the server at {describe_address(pool)} does not speak Redis: {shown}; "
        "set REDIS_URL or --redis to the address of a Redis server"
    )


def _uses_tls(pool: ConnectionPool) -> bool:
    """Whether a pool's connections are encrypted."""
    return issubclass(pool.connection_class, SSLConnection)

"""Opens clients for a URL. They never retry on their own: the caller decides what to send again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ..errors import ConfigurationError
from .address import check_address, redact_url
from .cluster import ClusterConnection, ClusterSSLConnection, Route
from .transient_errors import RetryableUnixConnection

__all__ = ["open_client", "open_pool"]

_PLACE = frozenset({"host", "port", "path", "username", "password"})

_OPTIONS = frozenset(
    {
        "client_name", "db", "health_check_interval", "max_connections", "protocol",
        "retry_on_timeout", "socket_connect_timeout", "socket_keepalive", "socket_timeout",
        "ssl_ca_certs", "ssl_ca_data", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname",
        "ssl_ciphers", "ssl_keyfile",
    }
)  # fmt: skip
"""Options allowed in a URL's query: those of redis-py that do not contradict ours."""


def open_client(url: str, *, timeout_s: float, route: Route | None = None) -> Redis:
    """A client for a URL. It connects with its first command.

    Args:
        url: see :func:`open_pool`.
        timeout_s: limit on connecting and on each reply, in seconds.
        route: see :func:`open_pool`.

    Raises:
        ConfigurationError: see :func:`open_pool`.
    """
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return Redis.from_pool(open_pool(url, route=route, **limits))


def open_pool(url: str, *, route: Route | None = None, **options: Any) -> ConnectionPool:
    """A pool of connections for a URL, which may name any node of a cluster.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        route: shared with other pools of the same shard; None for one of its own.
        **options: of each connection; those in the URL take precedence.

    Raises:
        ConfigurationError: the URL is malformed or has an option that is not allowed.
    """
    try:
        check_address(url)
        named = parse_url(url)
        kind = named.pop("connection_class", Connection)
        _check_options(kind, named)
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigurationError(
            f"the Redis address {redact_url(url)} cannot be used: {error}"
        ) from None
    # redis-py 8 would speak RESP3, in which replies to plain commands have other shapes.
    options = {"retry": Retry(NoBackoff(), 0), "protocol": 2, **options, **named}
    if not issubclass(kind, Connection):  # a Unix socket leads to no other node
        return ConnectionPool(connection_class=RetryableUnixConnection, **options)
    following = ClusterSSLConnection if issubclass(kind, SSLConnection) else ClusterConnection
    return ConnectionPool(connection_class=following, route=route or Route(), **options)


def _check_options(kind: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Refuse options that redis-py would reject at the first connection, or ignore."""
    unknown = sorted(set(named) - _PLACE - _OPTIONS)
    if unknown:
        raise ValueError(
            f"it has no option {', '.join(unknown)}; leave it out, or take one of "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    if named.get("max_connections", 1) < 1:
        raise ValueError("max_connections must be at least 1")
    kind(**{name: value for name, value in named.items() if name != "max_connections"})

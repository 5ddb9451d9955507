"""Connections that go to the node of a Redis Cluster that serves a shard, whichever the URL names.

All keys of a shard lie in one slot, so a client needs one node, not a map of the cluster. A node
that is asked for a slot of another's has done nothing and answers ``MOVED slot host:port``. Here
that breaks the connection, and the next one goes to the node that was named. So clients meet a slot
that moves (a failover, a resharding) like any broken connection: what was under way is sent again,
which all that penstock sends allows for. If the named node cannot be reached, the next connection
begins at the URL's address again, where by then a new owner may be known.

On a server that is no cluster nothing of this happens, and nothing is asked beforehand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.exceptions import AuthenticationError, MovedError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import ConfigurationError
from .address import check_address, redact_url
from .transient_errors import PatientConnection, PatientLocalConnection

__all__ = ["Rerouted", "Route", "follow", "named_node", "open_pool"]

_T = TypeVar("_T")

_HOPS = 5
"""Nodes that are asked in a row before nodes that name each other count as unreachable."""

_PLACE = frozenset({"host", "port", "path", "username", "password"})

_OPTIONS = frozenset(
    {
        "client_name", "db", "health_check_interval", "max_connections", "protocol",
        "retry_on_timeout", "socket_connect_timeout", "socket_keepalive", "socket_timeout",
        "ssl_ca_certs", "ssl_ca_data", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname",
        "ssl_ciphers", "ssl_keyfile",
    }
)  # fmt: skip
"""What may stand behind the ``?`` of a URL: what redis-py's connections know, and ours can bear."""


class Rerouted(RedisConnectionError):
    """Another node serves this shard; the next connection goes there."""


class Route:
    """Where a client's connections go.

    Attributes:
        node: host and port of the node that another one named; None for the URL's address.
    """

    __slots__ = ("node",)

    def __init__(self) -> None:
        self.node: tuple[str, int] | None = None

    def leave(self, node: tuple[str, int]) -> None:
        """A node cannot be reached: begin at the URL's address again."""
        if self.node == node:
            self.node = None


class _Following(PatientConnection, Connection):
    """A connection that goes where its route says.

    Args:
        route: shared by all connections of a client, or of a process.
        **options: as of ``redis.asyncio.Connection``; host and port are the URL's.
    """

    def __init__(self, *, route: Route, **options: Any) -> None:
        super().__init__(**options)
        self._home = (str(self.host), int(self.port))
        self._route = route

    async def connect(self) -> None:
        """Connect, unless that is done already."""
        if self.is_connected:
            return
        node = self._route.node or self._home
        self.host, self.port = node
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            if node == self._home or isinstance(error, AuthenticationError):
                raise
            self._route.leave(node)
            raise RedisConnectionError(
                f"{error} (the cluster's node at {_address(self._home)} names {_address(node)} as "
                "the one that serves this shard; it must be reachable from here under that name: "
                "see cluster-announce-ip of redis.conf)"
            ) from error

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply; an answer that sends us elsewhere breaks the connection.

        Raises:
            Rerouted: another node serves the shard. Nothing of the command was executed.
            NotNow: see :class:`PatientConnection`.
        """
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            here = (str(self.host), int(self.port))
            node = named_node(error, here)
            if node is not None:
                self._route.node = node
                await self.disconnect(nowait=True)
                raise Rerouted(
                    f"{_address(here)} does not serve this shard, {_address(node)} does"
                ) from error
            raise


class _FollowingSSL(_Following, SSLConnection):
    """The same with TLS."""


def open_pool(url: str, *, route: Route | None = None, **options: Any) -> ConnectionPool:
    """A pool of connections for a URL, which may name any node of a cluster.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        route: shared with other pools of the same shard; None for one of its own.
        **options: of each connection; those in the URL go before.

    Raises:
        ConfigurationError: the URL is not one, or has an option that can not be.
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
    options |= named
    if not issubclass(kind, Connection):  # a Unix socket: its server is here
        return ConnectionPool(connection_class=PatientLocalConnection, **options)
    following = _FollowingSSL if issubclass(kind, SSLConnection) else _Following
    return ConnectionPool(connection_class=following, route=route or Route(), **options)


def _check_options(kind: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Refuse options in a URL that would be found out at the first connection, or never."""
    unknown = sorted(set(named) - _PLACE - _OPTIONS)
    if unknown:
        raise ValueError(
            f"it has no option {', '.join(unknown)}; leave it out, or take one of "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    if named.get("max_connections", 1) < 1:
        raise ValueError("max_connections must be at least 1")
    kind(**{name: value for name, value in named.items() if name != "max_connections"})


async def follow(send: Callable[[], Awaitable[_T]]) -> _T:
    """Run a repeatable command, again at each node that another one names.

    Raises:
        Rerouted: nodes go on naming each other.
    """
    for _ in range(_HOPS):
        try:
            return await send()
        except Rerouted:
            continue
    return await send()


def named_node(error: object, here: tuple[str, int] = ("", 0)) -> tuple[str, int] | None:
    """The node that a ``MOVED`` names, as host and port; None for any other error or reply.

    Args:
        error: what the server answered.
        here: who answered; a node that does not know its name leaves out the host, which is this.
    """
    if isinstance(error, MovedError):
        host, port = error.host, str(error.port)
    elif isinstance(error, ResponseError) and str(error).startswith("MOVED "):
        host, _, port = str(error).split(" ")[-1].rpartition(":")
    else:
        return None
    return (host if host not in ("", "?") else here[0]), int(port)


def _address(node: tuple[str, int]) -> str:
    return f"{node[0]}:{node[1]}"

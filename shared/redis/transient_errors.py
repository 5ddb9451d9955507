"""Transient refusals: the server answers, has executed nothing, and would accept the command later.

Examples: another client's script takes too long (``BUSY``), a primary has just become a replica
(``READONLY``), the disk is full (``MISCONF``), replicas lag (``NOREPLICAS``). Treating these as
final would throw away the work that a worker has in progress. Clients treat them like a broken
connection and send the same commands again. They also close the connection, because the address
may lead to another server by now.

Redis refuses each of penstock's scripts before or at its first write, so nothing is half done.
"""

from __future__ import annotations

import re
from typing import Any

from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

__all__ = [
    "ClusterUnavailable",
    "RetryableConnection",
    "RetryableUnixConnection",
    "TransientRefusal",
    "is_transient",
]

_CLUSTER = (AskError, ClusterDownError, TryAgainError)
_CLUSTER_WORDS = ("ASK ", "CLUSTERDOWN ", "TRYAGAIN ")

_TRANSIENT = re.compile(
    "(BUSY|MASTERDOWN|MISCONF|NOREPLICAS|READONLY) "
    # Redis 6.2 wraps the refusal of a command inside a script like this.
    "|Error running script .*: -(MISCONF|NOREPLICAS|READONLY) "
)


class TransientRefusal(RedisConnectionError):
    """The server refuses the command for now and has executed nothing of it."""


class ClusterUnavailable(TransientRefusal):
    """No node serves this shard now: its slot is being moved, or the cluster is down."""


def is_transient(error: ResponseError) -> bool:
    """Whether the server executed nothing and may accept the same command later."""
    # (redis-py itself treats a server that is loading its data as a broken connection.)
    if isinstance(error, MasterDownError | ReadOnlyError):
        return True
    return _TRANSIENT.match(str(error)) is not None


class RetryableConnection(AbstractConnection):
    """A connection that breaks on a transient refusal, so that callers simply retry."""

    async def disconnect(self, nowait: bool = False, **options: Any) -> None:
        """Close the connection.

        Args:
            nowait: drop what is not sent yet, and take no leave of a server that speaks TLS.
                Without this a socket stays open for up to 30 s, or for ever if the loop ends.
            **options: what redis-py tells itself since 7.3: the error, how many attempts failed.
        """
        writer = self._writer
        await super().disconnect(nowait, **options)
        if nowait and writer is not None:
            writer.transport.abort()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply.

        Raises:
            TransientRefusal: the server refuses for now. The replies to later commands are lost;
                the server may have executed those commands.
        """
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if isinstance(error, _CLUSTER) or str(error).startswith(_CLUSTER_WORDS):
                refusal: type[TransientRefusal] = ClusterUnavailable
            elif is_transient(error):
                refusal = TransientRefusal
            else:
                raise
            await self.disconnect(nowait=True)
            raise refusal(str(error)) from error


class RetryableUnixConnection(RetryableConnection, UnixDomainSocketConnection):
    """The same over a Unix socket."""

"""Refusals that pass: the server answers, did nothing, and would do it at another time.

A script of somebody else's that takes too long (``BUSY``), a primary that became a replica a moment
ago (``READONLY``), a full disk (``MISCONF``), replicas that lag (``NOREPLICAS``): to take these for
the last word would throw away what a worker runs. They are met like a broken connection: what was
under way is sent again, unchanged. The connection is given up, too, since behind the address that
was given there may be another server by now.

All of penstock's scripts are refused before their first write or at it, so nothing is half done.
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

__all__ = ["ClusterBusy", "NotNow", "PatientConnection", "PatientLocalConnection", "is_passing"]

_CLUSTER = (AskError, ClusterDownError, TryAgainError)
_CLUSTER_WORDS = ("ASK ", "CLUSTERDOWN ", "TRYAGAIN ")

_PASSING = re.compile(
    "(BUSY|MASTERDOWN|MISCONF|NOREPLICAS|READONLY) "
    # So Redis 6.2 wraps what a command in a script was refused with.
    "|Error running script .*: -(MISCONF|NOREPLICAS|READONLY) "
)


class NotNow(RedisConnectionError):
    """The server refuses for now. Nothing of the command was executed."""


class ClusterBusy(NotNow):
    """No node serves this shard just now: its slot is being moved, or the cluster is down."""


def is_passing(error: ResponseError) -> bool:
    """Whether the same command may be accepted later, and nothing of it was executed."""
    # (A server that loads its data is a broken connection to redis-py itself.)
    if isinstance(error, MasterDownError | ReadOnlyError):
        return True
    return _PASSING.match(str(error)) is not None


class PatientConnection(AbstractConnection):
    """A connection on which a refusal that passes is a broken connection."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply.

        Raises:
            NotNow: the server refuses for now. Replies to later commands are not read any more;
                those may have been executed.
        """
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if isinstance(error, _CLUSTER) or str(error).startswith(_CLUSTER_WORDS):
                refusal: type[NotNow] = ClusterBusy
            elif is_passing(error):
                refusal = NotNow
            else:
                raise
            await self.disconnect(nowait=True)
            raise refusal(str(error)) from error


class PatientLocalConnection(PatientConnection, UnixDomainSocketConnection):
    """The same over a Unix socket."""

"""The connection that an answer is written to, beside ASGI.

ASGI's ``send`` is a coroutine: a task must run for every event of every stream. An answer that has
begun writes to its connection directly instead, in the turn of the event loop in which its tokens
arrive.
"""

from __future__ import annotations

from typing import Protocol, cast

from starlette.types import Scope

__all__ = ["CONNECTION", "Connection", "ConnectionListener", "connection_of"]

CONNECTION = "penstock.connection"
"""Where a request's scope holds its connection."""


class ConnectionListener(Protocol):
    """An answer, as its connection calls it."""

    def on_lost(self) -> None:
        """The client has left."""

    def on_full(self) -> None:
        """The client reads slowly: what is written now takes memory."""

    def on_free(self) -> None:
        """It has read what there was."""


class Connection(Protocol):
    """The connection of a request whose answer is being sent."""

    def listen(self, listener: ConnectionListener | None) -> None:
        """Call this listener from now on; at once, if the client has left already."""

    def hold(self) -> None:
        """Keep what is written until :meth:`release`, and send it in one write then."""

    def release(self) -> None:
        """Send what was kept; repeating it is harmless."""

    def write_body(self, data: bytes) -> None:
        """Write a piece of a body whose head has been sent through ASGI."""


def connection_of(scope: Scope) -> Connection:
    """The connection of a request; :class:`..serving.http_server.GatewayServer` provides it."""
    return cast(Connection, scope[CONNECTION])

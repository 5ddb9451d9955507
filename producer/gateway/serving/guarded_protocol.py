"""HTTP connections with bounds on a request's head, which answers can write to directly.

uvicorn has no such bounds for httptools: a client that opens a connection and sends a byte a minute
would hold it for ever, and a head may be of any size.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..answering.connection import CONNECTION, ConnectionListener
from .held_transport import HeldTransport

__all__ = ["guarded_protocol"]

_MAX_HEAD_BYTES = 64 << 10


def guarded_protocol(head_timeout_s: float) -> type[asyncio.Protocol]:
    """The protocol for uvicorn's ``http`` option.

    Args:
        head_timeout_s: how long a request's head may take to arrive.
    """

    class GuardedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._head_timer: asyncio.TimerHandle | None = None
            self._head_bytes = 0
            self._listener: ConnectionListener | None = None
            self._is_lost = False

        def listen(self, listener: ConnectionListener | None) -> None:
            """See :class:`..answering.connection.Connection`."""
            self._listener = listener
            if listener is not None and self._is_lost:
                listener.on_lost()

        def write_body(self, data: bytes) -> None:
            """See :class:`..answering.connection.Connection`."""
            # uvicorn sends every body without a declared length in chunks (RFC 9112, section 7.1).
            self._held_transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        def hold(self) -> None:
            """See :class:`..answering.connection.Connection`."""
            self._held_transport.hold()

        def release(self) -> None:
            """See :class:`..answering.connection.Connection`."""
            self._held_transport.release()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._listener is not None:
                self._listener.on_full()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._listener is not None:
                self._listener.on_free()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._held_transport = HeldTransport(transport)
            super().connection_made(self._held_transport)
            self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)
            self._is_lost = True
            if self._listener is not None:
                self._listener.on_lost()

        def data_received(self, data: bytes) -> None:
            if self._head_timer is not None:
                self._head_bytes += len(data)
                # What follows the head in the same piece counts, too; no head is near the bound.
                if self._head_bytes > _MAX_HEAD_BYTES and len(data) < self._head_bytes:
                    self._refuse(b"431 Request Header Fields Too Large")
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[CONNECTION] = self
            if self._head_timer is None:
                self._begin_head()

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def _begin_head(self) -> None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(
                head_timeout_s, self._refuse, b"408 Request Timeout"
            )

        def _end_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self, status: bytes) -> None:
            self._end_head()
            if not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()

    return GuardedProtocol

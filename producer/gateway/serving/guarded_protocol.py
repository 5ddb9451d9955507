"""HTTP connections with bounds on heads and trailers, which answers can write to directly.

uvicorn has no such bounds for httptools. A client that sends a byte a minute would hold its
connection for ever, and a head could have any size. What is refused here never reaches the app, and
gets the same error object.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..answering.connection import CONNECTION, ConnectionListener
from ..api_errors import ApiError
from .held_transport import HeldTransport
from .upgrade_parser import UpgradeParser

__all__ = ["guarded_protocol"]

_MAX_HEAD_BYTES = 64 << 10

_MAX_WAITING = 32
"""How many requests of a connection may wait behind the one that is being answered. uvicorn parses
all that has come, and reads on after each answer."""

_LINGER_S = 5.0
"""How long a connection takes in the rest of a body that is answered already. Closing at once
would reset it, and its client might lose the answer."""


def guarded_protocol(
    head_timeout_s: float, on_refused: Callable[[str], object]
) -> type[asyncio.Protocol]:
    """The protocol for uvicorn's ``http`` option.

    Args:
        head_timeout_s: how long a request's head may take to arrive.
        on_refused: told the ``code`` of what never reaches the app.
    """

    class GuardedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._parser = UpgradeParser(self)
            self.parser = cast(Any, self._parser)
            self._head_timer: asyncio.TimerHandle | None = None
            self._head_bytes = 0
            self._reads_body = False
            self._skips_body = False  # the parser does, and goes on with it later
            self._quiet_bytes = 0  # since the last piece of a body
            self._trailer_bytes = 0
            self._listener: ConnectionListener | None = None
            self._is_lost = False
            self._lingers = False
            self._takes_no_more = False
            self._app, self.app = self.app, self._serve

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
            if self._takes_no_more:
                return
            if self._head_timer is None and self._is_between_requests():
                self._begin_head()  # an empty line may come first, which no callback tells
            if self._head_timer is not None:
                self._head_bytes += len(data)
            self._quiet_bytes += len(data)
            super().data_received(data)
            # Of a head that ended in this piece, on_headers_complete knows the size.
            if self._head_timer is not None and self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse_large_head()
            # So has a trailer that goes on: the parser keeps it, and tells nothing before its end.
            if self._reads_body and self._quiet_bytes > _MAX_HEAD_BYTES:
                self._refuse_large_trailers()

        def send_400_response(self, msg: str) -> None:
            """Refuse what is no HTTP; uvicorn has logged it."""
            self._refuse(ApiError(400, msg, "invalid_http"))

        def on_message_begin(self) -> None:
            if self._takes_no_more:
                return
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[CONNECTION] = self
            if self._head_timer is None:
                self._begin_head()

        def on_header(self, name: bytes, value: bytes) -> None:
            """Keep a field of the head. A trailer must not pass for one, and is dropped."""
            if not self._reads_body:
                super().on_header(name, value)
                return
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > _MAX_HEAD_BYTES:
                self._refuse_large_trailers()

        def on_headers_complete(self) -> None:
            self._end_head()
            if len(self.pipeline) >= _MAX_WAITING:
                self._takes_no_more = True  # its client sends the rest again
                self.cycle.keep_alive = False
            if self._takes_no_more:
                return
            self._reads_body, self._quiet_bytes, self._trailer_bytes = True, 0, 0
            self._skips_body = self._parser.skips_body()
            # Around a name and its value stand a colon, a space and the line's end.
            fields = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + fields > _MAX_HEAD_BYTES:
                self._refuse_large_head()
            if not self.transport.is_closing():
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._quiet_bytes = 0
            # Nor is there an answer to a refused head.
            if not (self._takes_no_more or self.transport.is_closing()):
                super().on_body(body)

        def on_message_complete(self) -> None:
            if self._skips_body:
                self._skips_body = False
                return
            self._reads_body = False
            if not (self._takes_no_more or self.transport.is_closing()):
                super().on_message_complete()
                if self._lingers and self.cycle.response_complete:
                    self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._lingers and self.cycle.more_body:
                self.loop.call_later(_LINGER_S, self.transport.close)
            elif self._lingers:
                self.transport.close()

        async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
            """Call the app; an answer that leaves before all of the body came ends the connection.

            Else its client could hold it for ever, with a byte of the body now and then.
            """

            async def send_or_end(message: Message) -> None:
                cycle = self.cycle  # of the next request, if this one came whole
                begins = message["type"] == "http.response.start"
                if not (begins and cycle.scope is scope and cycle.more_body):
                    await send(message)
                    return
                cycle.keep_alive = False  # uvicorn tells the client,
                await send(message)
                cycle.keep_alive = True  # but we close, once the body has come or its time is over
                self._lingers = True

            await self._app(scope, receive, send_or_end)

        def _is_between_requests(self) -> bool:
            return self.cycle is not None and self.cycle.response_complete and not self._reads_body

        def _begin_head(self) -> None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(head_timeout_s, self._refuse_slow_head)

        def _end_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse_large_head(self) -> None:
            message = f"the request's head is larger than {_MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, "head_too_large"))

        def _refuse_large_trailers(self) -> None:
            message = f"the trailers of the request's body are larger than {_MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, "head_too_large"))

        def _refuse_slow_head(self) -> None:
            message = f"the request's head did not come within {head_timeout_s:g} s"
            self._refuse(ApiError(408, message, "request_timeout"))

        def _refuse(self, error: ApiError) -> None:
            self._end_head()
            if self.transport.is_closing():
                return
            on_refused(error.code)
            answer = self.cycle  # to the last request, if several wait
            is_over = answer is None or answer.response_complete
            if is_over or not (self.pipeline or answer.response_started):
                self.transport.write(_whole_answer(error))
            self.transport.close()  # at once where another answer is under way: it ends too early

    return GuardedProtocol


def _whole_answer(error: ApiError) -> bytes:
    body = error.body()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: req-{uuid.uuid4().hex}",
        "connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body

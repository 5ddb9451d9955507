"""An answer whose request is submitted only after another one has told something of its prompt.

A worker computes it, which may take as long as any request. Meanwhile the client of a stream gets
comments, and a client that leaves ends the wait.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..api_errors import ApiError, error_response, response_of
from .connection import Connection, connection_of
from .open_answers import OpenAnswers
from .output_answer import CLIENT_LEFT
from .sse import HEADERS, KEEP_ALIVE

__all__ = ["PreparedAnswer"]


class PreparedAnswer(Response):
    """Another answer, once it is there.

    Args:
        prepare: makes it; cancelled if the client leaves.
        answers: the open answers of the process.
        streams: the client asked for events, so that comments may come before them.
    """

    def __init__(
        self,
        prepare: Callable[[], Awaitable[Response]],
        *,
        answers: OpenAnswers,
        streams: bool,
    ) -> None:
        super().__init__()
        self._prepare = prepare
        self._answers = answers
        self._streams = streams
        self._id = f"req-{uuid.uuid4().hex}"
        self._silent_ticks = 0
        self._comment = asyncio.Event()
        self._connection: Connection | None = None  # once the head is sent
        self._is_left = False
        self._task: asyncio.Future[Response] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Prepare the answer, and send it."""
        connection = connection_of(scope)
        self._task = asyncio.ensure_future(self._prepare())
        self._answers.add(self)
        connection.listen(self)
        try:
            comment = asyncio.ensure_future(self._comment.wait())
            await asyncio.wait({self._task, comment}, return_when=asyncio.FIRST_COMPLETED)
            comment.cancel()
            if not self._task.done():
                await self._send_head(connection, send)
                await asyncio.wait({self._task})
        finally:
            self._task.cancel()
            connection.listen(None)
            self._answers.remove(self)
        answer = self._answer(scope)
        if answer is not None:
            await answer(scope, receive, send if self._connection is None else _rest(send))

    def _answer(self, scope: Scope) -> Response | None:
        """What to send; None if the client has left."""
        assert self._task is not None
        if not self._task.cancelled():
            error = self._task.exception()
            return self._task.result() if error is None else response_of(error)
        if self._is_left:
            scope[CLIENT_LEFT] = self._id
            return None
        message = "the gateway ends, and the request was not submitted yet: send it again"
        return error_response(ApiError(503, message, "gateway_shutdown", retry_after_s=1))

    async def _send_head(self, connection: Connection, send: Send) -> None:
        headers = [*HEADERS, (b"x-request-id", self._id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        connection.write_body(KEEP_ALIVE)
        connection.release()
        self._connection = connection

    def tick(self, keep_alive_after: int) -> None:
        """Write a comment after a long silence; see :class:`.open_answers.OpenAnswer`."""
        self._silent_ticks += 1
        if not self._streams or self._silent_ticks <= keep_alive_after:
            return
        self._silent_ticks = 0
        if self._connection is None:
            self._comment.set()
        else:
            self._connection.write_body(KEEP_ALIVE)

    def end_early(self) -> None:
        """See :class:`.open_answers.OpenAnswer`."""
        self._stop()

    def on_lost(self) -> None:
        """See :class:`.connection.ConnectionListener`."""
        self._is_left = True
        self._stop()

    def on_full(self) -> None:
        """See :class:`.connection.ConnectionListener`; comments are small."""

    def on_free(self) -> None:
        """See :class:`.connection.ConnectionListener`."""

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _rest(send: Send) -> Send:
    """What follows a head that was sent: events, or an error as one."""
    is_error = False

    async def send_rest(message: Message) -> None:
        nonlocal is_error
        if message["type"] == "http.response.start":
            is_error = message["status"] != 200
            return
        if is_error:
            message = {**message, "body": b"data: " + message["body"] + b"\n\n"}
        await send(message)

    return send_rest

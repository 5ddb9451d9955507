"""Answers to requests that were submitted: as a stream of events, or as one object at the end.

The status waits until something is known: the first event, the end of the request, or the first
keep-alive comment. So a request that a worker refuses at once gets its own status, also where a
stream was asked for.

An answer has one task, which sleeps from the first event to the last. The callback that brings
tokens writes them to the connection. A client that leaves is noticed at once. ``on_leave`` decides
what becomes of its request.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.shared.errors import PenstockError
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import State

from ...choices import gather_choices
from ...results import Result
from ..api_errors import ApiError, error_of, error_response
from .connection import Connection, connection_of
from .open_answers import OpenAnswers
from .request_output import RETURN_S, Output
from .sse import HEADERS, KEEP_ALIVE

__all__ = ["CLIENT_LEFT", "EventWriter", "StreamedAnswer", "WholeAnswer"]

_log = logging.getLogger("penstock.gateway")

CLIENT_LEFT = "penstock.client_left"
"""Where the scope of a request whose client left before the end of the answer has its id."""

_NAMES = {"from_index": "from"}

_Leave = Callable[[], Awaitable[None]]


class EventWriter(Protocol):
    """Turns a request's output into the bytes of events."""

    def chunk(self, chunk: Chunk) -> bytes:
        """Events of a chunk; may be empty."""

    def end(self, end: End) -> bytes:
        """The last events.

        Raises:
            ApiError: the request was not completed.
        """

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream without success."""


class _Answer(Response, ABC):
    """What both kinds of answers share.

    Args:
        outputs: of its requests; nearly always one.
        answers: the open answers of the process.
        on_leave: what to do when the client left before the end.
        on_done: what to do in any case, at the end; repeating it is harmless.
        headers: further headers of the response.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        *,
        answers: OpenAnswers,
        on_leave: _Leave,
        on_done: _Leave,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._output = outputs[0]
        self._outputs = outputs
        self._answers = answers
        self._on_leave = on_leave
        self._on_done = on_done
        self._extra = headers
        self._left = False
        self._moves = False
        self._end: End | None = None
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        self._answers.add(self)
        connection.listen(self)
        try:
            if not self._is_over():
                self._start()
            await self._answer(scope, receive, send)
            if self._left:
                scope[CLIENT_LEFT] = self._output.feed.id
                await self._on_leave()
        except PenstockError as error:
            _log.warning("the request %s of a client that left: %s", self._output.feed.id, error)
        finally:
            connection.listen(None)
            self._answers.remove(self)
            self._close_feeds()
            await self._on_done()

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""

    @abstractmethod
    def _start(self) -> None:
        """Have the outputs read."""

    def _close_feeds(self) -> None:
        for output in self._outputs:
            output.feed.close()

    def on_end(self, end: End) -> None:
        """See :class:`...reading.feed.FeedReader`."""
        self._end = end
        self._wake()

    def on_failure(self, error: Exception) -> None:
        """See :class:`...reading.feed.FeedReader`."""
        self._failure = error
        self._wake()

    def on_lost(self) -> None:
        """See :class:`.connection.ConnectionListener`."""
        self._left = True
        self._close_feeds()
        self._wake()

    def on_full(self) -> None:
        """See :class:`.connection.ConnectionListener`."""
        for output in self._outputs:
            output.feed.pause()

    def on_free(self) -> None:
        """See :class:`.connection.ConnectionListener`."""
        for output in self._outputs:
            output.feed.resume()

    def end_early(self) -> None:
        """See :class:`.open_answers.OpenAnswer`."""
        if not self._is_over():
            feed = self._output.feed
            message = (
                f"the gateway ends; the request goes on: GET /v1/streams/{feed.id}"
                f"?from={feed.index} at another one"
            )
            if self._output.needs_reader:
                message += f" within {RETURN_S} s"
            self._moves = True
            self._failure = ApiError(503, message, "gateway_shutdown", retry_after_s=1)
            self._close_feeds()
            self._wake()

    def tick(self, keep_alive_after: int) -> None:
        """See :class:`.open_answers.OpenAnswer`."""

    def _is_over(self) -> bool:
        return self._left or self._end is not None or self._failure is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _sleep(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _error(self) -> ApiError | None:
        """The error that the output ended with."""
        error = self._failure
        if error is None or isinstance(error, ApiError):
            return error
        if isinstance(error, PenstockError):
            return error_of(error, _NAMES)
        return ApiError(500, "an internal error", "internal_error")

    async def _settle(self) -> None:
        """Be done before the last byte: its client may ask for more as soon as it has that."""
        if self._end is not None:
            await self._on_done()
        elif self._moves:
            await asyncio.gather(*(output.hold() for output in self._outputs))

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error, self._extra)(scope, receive, send)


class StreamedAnswer(_Answer):
    """The output as server-sent events.

    Args:
        output: the request's output.
        writer: makes the events.
        answers, on_leave, on_done, headers: see :class:`_Answer`.
    """

    def __init__(
        self,
        output: Output,
        writer: EventWriter,
        *,
        answers: OpenAnswers,
        on_leave: _Leave,
        on_done: _Leave,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            [output], answers=answers, on_leave=on_leave, on_done=on_done, headers=headers
        )
        self._writer = writer
        self._pending: list[bytes] = []
        self._connection: Connection | None = None  # once the head is sent
        self._silent_ticks = 0

    def _start(self) -> None:
        self._output.start(self)

    def on_chunk(self, chunk: Chunk) -> None:
        """Write its events."""
        self._write(self._writer.chunk(chunk))

    def tick(self, keep_alive_after: int) -> None:
        """Write a comment after a long silence."""
        self._silent_ticks += 1
        if self._silent_ticks > keep_alive_after:
            self._write(KEEP_ALIVE)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._silent_ticks = 0
        if self._connection is None:
            self._pending.append(data)
            self._wake()
        else:
            self._connection.write_body(data)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, feed = self._answers.metrics, self._output.feed
        began, first = asyncio.get_running_loop().time(), self._output.index
        metrics.open_streams.inc()
        try:
            last = b""
            if not self._pending and not self._is_over():
                await self._sleep()
            if not self._pending and not self._left:
                try:
                    last = self._last()
                except ApiError as error:
                    await self._settle()
                    await self._fail(error, scope, receive, send)
                    return
            metrics.first_token.observe(asyncio.get_running_loop().time() - began)
            await send({"type": "http.response.start", "status": 200, "headers": self._head()})
            self._connection = connection_of(scope)
            if self._pending:
                self._connection.write_body(b"".join(self._pending))
                self._pending.clear()
            self._connection.release()
            if not self._is_over():
                await self._sleep()
            await self._settle()
            if not self._left:
                last = last or self._last_or_error()
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            metrics.open_streams.dec()
            metrics.stream_tokens.inc(max(0, feed.index - first))

    def _head(self) -> list[tuple[bytes, bytes]]:
        extra = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._extra.items()]
        return [*HEADERS, *extra]

    def _last(self) -> bytes:
        """The last events.

        Raises:
            ApiError: there is no success.
        """
        error = self._error()
        if error is not None:
            raise error
        assert self._end is not None
        return self._writer.end(self._end)

    def _last_or_error(self) -> bytes:
        try:
            return self._last()
        except ApiError as error:
            return self._writer.error(error)


class WholeAnswer(_Answer):
    """The outputs as one JSON object, after the end of every request.

    Where one request fails, the others are given up.

    Args:
        outputs: of the requests.
        build: makes the body of completed requests; raises ApiError for any other.
        answers, on_leave, on_done, headers: see :class:`_Answer`.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        build: Callable[[Sequence[Result]], bytes],
        *,
        answers: OpenAnswers,
        on_leave: _Leave,
        on_done: _Leave,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            outputs, answers=answers, on_leave=on_leave, on_done=on_done, headers=headers
        )
        self._build = build
        self._parts = [_Part(output.feed.id, self) for output in outputs]

    def _start(self) -> None:
        for output, part in zip(self._outputs, self._parts, strict=True):
            output.start(part)

    def on_end(self, end: End) -> None:
        """One request has ended."""
        failed = end.state is not State.COMPLETED
        if failed or all(part.end is not None for part in self._parts):
            super().on_end(end)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_over():
            await self._sleep()
        await self._settle()
        if self._left:
            return
        try:
            body = self._body()
        except ApiError as error:
            if len(self._outputs) > 1:
                await self._on_leave()
            await self._fail(error, scope, receive, send)
        else:
            response = Response(body, headers=dict(self._extra), media_type="application/json")
            await response(scope, receive, send)

    def _body(self) -> bytes:
        error = self._error()
        if error is not None:
            raise error
        return self._build([part.result() for part in self._parts if part.end is not None])


class _Part:
    """Gathers one of the outputs of a whole answer."""

    def __init__(self, request_id: str, answer: WholeAnswer) -> None:
        self.end: End | None = None
        self._id = request_id
        self._answer = answer
        self._chunks: list[Chunk] = []

    def on_chunk(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def on_end(self, end: End) -> None:
        self.end = end
        self._answer.on_end(end)

    def on_failure(self, error: Exception) -> None:
        self._answer.on_failure(error)

    def result(self) -> Result:
        chunks, end = self._chunks, self.end
        assert end is not None
        return Result(
            id=self._id,
            choices=gather_choices(chunks, end),
            end=end,
            prompt_logprobs=chunks[0].prompt_logprobs if chunks else (),
            packed_value=chunks[0].result if chunks else b"",
        )

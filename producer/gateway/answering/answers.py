"""Answers to requests that were submitted: as a stream of events, or as one object at the end.

Nothing is sent before something is known: the status waits for the first event, for the end of the
request, or for the first keep-alive comment. So a request that a worker refuses at once gets its
own status, also where a stream was asked for.

A client that leaves is noticed at once. What becomes of its request is decided by ``on_leave``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.shared.errors import PenstockError
from penstock.shared.protocol import Chunk, End

from ...results import Result
from ...stream import TokenStream
from ..api_errors import ApiError, error_of, error_response
from .open_answers import OpenAnswers
from .sse import HEADERS, KEEP_ALIVE

__all__ = ["CLIENT_LEFT", "EventWriter", "StreamedAnswer", "WholeAnswer"]

_log = logging.getLogger("penstock.gateway")

CLIENT_LEFT = "penstock.client_left"
"""Set in the scope of a request whose client left before the end of the answer."""

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


class _Answer(Response):
    """What both kinds of answers share.

    Args:
        stream: the request's output.
        answers: the open answers of the process.
        on_leave: what to do when the client left before the end.
        on_done: what to do in any case, at the end; repeating it is harmless.
        headers: further headers of the response.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        answers: OpenAnswers,
        on_leave: _Leave,
        on_done: _Leave,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._stream = stream
        self._answers = answers
        self._on_leave = on_leave
        self._on_done = on_done
        self._extra = dict(headers)
        self._left = False
        self._ended_early = False
        self._closing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        self._answers.add(self)
        try:
            await self._answer(scope, receive, send)
            if self._left:
                scope[CLIENT_LEFT] = True
                await self._on_leave()
        except PenstockError as error:
            _log.warning("the request %s of a client that left: %s", self._stream.id, error)
        finally:
            watcher.cancel()
            self._answers.remove(self)
            await self._stream.aclose()
            await self._on_done()

    async def _settle(self) -> None:
        """Be done before the last byte: its client may ask for more as soon as it has that."""
        if self._stream.end is not None:
            await self._on_done()

    def end_early(self) -> None:
        """Close the stream, because the gateway ends; the client is told where to resume."""
        self._ended_early = True
        self._closing = asyncio.create_task(self._stream.aclose())

    def _shutdown_error(self) -> ApiError:
        message = (
            f"the gateway ends; the request goes on: GET /v1/streams/{self._stream.id}"
            f"?from={self._stream.index} at another one"
        )
        return ApiError(503, message, "gateway_shutdown", retry_after_s=1)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        """Close the stream when the client leaves: its reader sees the end of the iteration."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        await self._stream.aclose()

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error, self._extra)(scope, receive, send)


class StreamedAnswer(_Answer):
    """The output as server-sent events.

    Args:
        stream: the request's output; its timeout is the longest silence.
        writer: makes the events.
        answers, on_leave, on_done, headers: see :class:`_Answer`.
    """

    def __init__(
        self,
        stream: TokenStream,
        writer: EventWriter,
        *,
        answers: OpenAnswers,
        on_leave: _Leave,
        on_done: _Leave,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            stream, answers=answers, on_leave=on_leave, on_done=on_done, headers=headers
        )
        self._writer = writer
        self._started = False
        self._began = 0.0

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._answers.metrics
        self._began = asyncio.get_running_loop().time()
        first = self._stream.index
        metrics.open_streams.inc()
        try:
            await self._pump(send)
        except PenstockError as error:
            await self._break(error_of(error, _NAMES), scope, receive, send)
        except ApiError as error:
            await self._break(error, scope, receive, send)
        finally:
            metrics.open_streams.dec()
            metrics.stream_tokens.inc(self._stream.index - first)

    async def _pump(self, send: Send) -> None:
        stream, writer = self._stream, self._writer
        while True:
            try:
                data = writer.chunk(await anext(stream))
                if stream.buffered:
                    parts = [data]
                    while stream.buffered:
                        parts.append(writer.chunk(await anext(stream)))
                    data = b"".join(parts)
            except TimeoutError:
                data = KEEP_ALIVE
            except StopAsyncIteration:
                break
            if data:
                await self._send(data, send)
        if self._ended_early and stream.end is None:
            raise self._shutdown_error()
        await self._settle()
        if stream.end is not None and not self._left:
            await self._send(writer.end(stream.end), send, last=True)

    async def _send(self, data: bytes, send: Send, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            now = asyncio.get_running_loop().time()
            self._answers.metrics.first_token.observe(now - self._began)
            headers = [
                (name.encode("latin-1"), value.encode("latin-1"))
                for name, value in {**HEADERS, **self._extra}.items()
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _break(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._left:
            return
        if self._started:
            await self._send(self._writer.error(error), send, last=True)
        else:
            await self._fail(error, scope, receive, send)


class WholeAnswer(_Answer):
    """The output as one JSON object, after the request's end.

    Args:
        stream: the request's output; its timeout is the longest silence.
        build: makes the body of a completed request; raises ApiError for any other.
        answers, on_leave, on_done, headers: see :class:`_Answer`.
    """

    def __init__(
        self,
        stream: TokenStream,
        build: Callable[[Result], bytes],
        *,
        answers: OpenAnswers,
        on_leave: _Leave,
        on_done: _Leave,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            stream, answers=answers, on_leave=on_leave, on_done=on_done, headers=headers
        )
        self._build = build

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            result = await self._collect()
            await self._settle()
            if result is None:
                return
            body = self._build(result)
        except PenstockError as error:
            await self._fail(error_of(error), scope, receive, send)
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        else:
            response = Response(body, headers=self._extra, media_type="application/json")
            await response(scope, receive, send)

    async def _collect(self) -> Result | None:
        try:
            return await self._stream.collect()
        except PenstockError:
            if self._left:
                return None
            if self._ended_early:
                raise self._shutdown_error() from None
            raise

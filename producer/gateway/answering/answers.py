"""Answers to requests that were submitted: as a stream of events, or as one object at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import State

from ...choices import gather_choices
from ...results import Result
from ..api_errors import ApiError, api_error_of
from .connection import Connection, connection_of
from .open_answers import OpenAnswers
from .output_answer import Leave, OutputAnswer
from .request_output import RETURN_S, Output
from .sse import HEADERS, KEEP_ALIVE

__all__ = ["EventWriter", "StreamedAnswer", "WholeAnswer"]


class EventWriter(Protocol):
    """Turns a request's output into the bytes of events."""

    @property
    def position(self) -> int:
        """The ``id`` of the last event so far: where a reader goes on that has seen it."""

    def opening(self) -> bytes:
        """Events that need no token; may be empty. They come once, before all others."""

    def chunk(self, chunk: Chunk) -> bytes:
        """Events of a chunk, behind the opening ones; may be empty."""

    def end(self, end: End) -> bytes:
        """The last events.

        Raises:
            ApiError: the request was not completed.
        """

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream without success."""


class StreamedAnswer(OutputAnswer):
    """The output as server-sent events.

    Args:
        output: the request's output.
        writer: makes the events.
        answers, on_leave, on_done, headers: see :class:`OutputAnswer`.
        opens: the status need not wait: the opening events are sent at once, if there are any.
    """

    def __init__(
        self,
        output: Output,
        writer: EventWriter,
        *,
        answers: OpenAnswers,
        on_leave: Leave,
        on_done: Leave,
        headers: Mapping[str, str],
        opens: bool = False,
    ) -> None:
        super().__init__(
            [output], answers=answers, on_leave=on_leave, on_done=on_done, headers=headers
        )
        self._writer = writer
        self._opens = opens
        self._pending: list[bytes] = []
        self._connection: Connection | None = None  # once the head is sent
        self._silent_ticks = 0
        now = asyncio.get_running_loop().time()
        self._asked_at = now if output.is_new else None  # until its first token

    def _start(self) -> None:
        self._output.start(self)

    def on_chunk(self, chunk: Chunk) -> None:
        """Write its events."""
        if self._asked_at is not None:
            now, asked_at, self._asked_at = asyncio.get_running_loop().time(), self._asked_at, None
            self._answers.metrics.first_token.observe(now - asked_at)
        self._write(self._writer.chunk(chunk))

    def tick(self, keep_alive_after: int) -> None:
        """Write a comment after a long silence, or the opening events, if they are due yet."""
        self._silent_ticks += 1
        if self._silent_ticks > keep_alive_after:
            self._write(self._writer.opening() or KEEP_ALIVE)

    def _way_on(self) -> str:
        path = f"/v1/streams/{self._output.feed.id}?from={self._writer.position}"
        limit = f" within {RETURN_S} s" if self._output.needs_reader else ""
        return f"the request goes on: GET {path} at another one{limit}"

    async def _settle(self) -> None:
        await super()._settle()
        if self._moves:
            await self._output.hold()

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
        first = self._output.index
        metrics.open_streams.inc()
        try:
            last: bytes | None = None
            if self._opens:
                self._write(self._writer.opening())
            if not self._pending and not self._is_over():
                await self._sleep()
            if not self._pending and not self._left:
                try:
                    last = self._last()
                except ApiError as error:
                    await self._settle()
                    await self._fail(error, scope, receive, send)
                    return
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
                if last is None:
                    last = self._last_or_error()
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
        try:
            return self._writer.end(self._end)
        except Exception as failed:
            raise api_error_of(failed) from failed

    def _last_or_error(self) -> bytes:
        try:
            return self._last()
        except ApiError as error:
            return self._writer.error(error)


class WholeAnswer(OutputAnswer):
    """The outputs as one JSON object, after the end of every request.

    Where one request fails, the others are given up.

    Args:
        outputs: of the requests.
        build: makes the body of completed requests; raises ApiError for any other.
        answers, on_leave, on_done, headers: see :class:`OutputAnswer`.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        build: Callable[[Sequence[Result]], bytes],
        *,
        answers: OpenAnswers,
        on_leave: Leave,
        on_done: Leave,
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

    def _way_on(self) -> str:
        return "send the request again; with the same Idempotency-Key it joins this one"

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
                await self._give_up()
            await self._fail(error, scope, receive, send)
        else:
            response = Response(body, headers=dict(self._extra), media_type="application/json")
            await response(scope, receive, send)

    def _body(self) -> bytes:
        """The object.

        Raises:
            ApiError: there is none.
        """
        error = self._error()
        if error is not None:
            raise error
        try:
            return self._build([part.result() for part in self._parts if part.end is not None])
        except Exception as failed:
            raise api_error_of(failed) from failed


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

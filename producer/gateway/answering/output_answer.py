"""What both forms of an answer to submitted requests share: events, and one object at the end.

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

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.shared.errors import PenstockError
from penstock.shared.protocol.events import End

from ..api_errors import ApiError, api_error_of, error_response
from .connection import connection_of
from .open_answers import OpenAnswers
from .request_output import Output

__all__ = ["CLIENT_LEFT", "Leave", "OutputAnswer"]

_log = logging.getLogger("penstock.gateway")

CLIENT_LEFT = "penstock.client_left"
"""Where the scope of a request whose client left before the end of the answer has its id."""

_NAMES = {"from_index": "from"}

Leave = Callable[[], Awaitable[None]]


class OutputAnswer(Response, ABC):
    """An answer made of the output of requests.

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
        on_leave: Leave,
        on_done: Leave,
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
        """Send the answer, and do what its end or its client's leaving asks for."""
        connection = connection_of(scope)
        self._answers.add(self)
        connection.listen(self)
        try:
            if not self._is_over():
                self._start()
            await self._answer(scope, receive, send)
            if self._left:
                scope[CLIENT_LEFT] = self._output.feed.id
                await self._give_up()
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

    async def _give_up(self) -> None:
        """Give up what still runs: no client waits for it."""
        try:
            await self._on_leave()
        except PenstockError as error:
            _log.warning("the request %s could not be given up: %s", self._output.feed.id, error)

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
            self._moves = True
            message = f"the gateway ends: {self._way_on()}"
            self._failure = ApiError(503, message, "gateway_shutdown", retry_after_s=1)
            self._close_feeds()
            self._wake()

    @abstractmethod
    def _way_on(self) -> str:
        """What a client is to do whose gateway ends."""

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
        return None if self._failure is None else api_error_of(self._failure, _NAMES)

    async def _settle(self) -> None:
        """Be done before the last byte: its client may ask for more as soon as it has that."""
        if self._end is not None:
            await self._on_done()

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._end is not None and self._output.repeats:
            error.retry, error.retry_after_s = False, None
        await error_response(error, self._extra)(scope, receive, send)

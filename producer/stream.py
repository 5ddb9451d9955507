"""A request's output as an asynchronous iterator: every token exactly once, by index.

The log is the truth, and the channel is a fast copy of it. A stream reads the log first. If the
request has not ended, the stream subscribes. It reads the log again once Redis confirms the
subscription, and then takes chunks as they are published. It returns to the log whenever the
channel may have lost something: after a gap, a reconnection, a buffer overflow or a second's
silence.

Workers end a request whose deadline has passed. Its readers do so, too, in case no worker lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Self

from penstock.shared.errors import InvalidRequest, StreamError
from penstock.shared.keys import Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End

from .choices import gather_choices
from .reading.log_reader import LogReader
from .reading.merge import Merger
from .reading.reader_heartbeat import ReaderHeartbeat, Registration
from .reading.subscriber import Subscriber
from .reading.subscription import Subscription
from .results import Result

__all__ = ["TokenStream"]

_EXPIRY_GRACE_S = 0.25
"""How long after a deadline a reader waits for a worker to end the request."""


class TokenStream:
    """Chunks of one request, from any index, live or late. Made by :meth:`Producer.stream`.

    ``async for chunk in stream`` yields chunks in order, without gap or overlap, until the request
    ends; then :attr:`end` says how. To leave early, use the stream as an asynchronous context
    manager or call :meth:`aclose`. A stream that is dropped cleans up when it is collected.

    Reading may begin at any index. The chunks are those that were published, or a single one once
    the log of an ended request has been made compact. An index where a chunk ended
    (``chunk.stop``) always resumes both tokens and text without a seam. At any other index the
    first chunk comes without the tokens before it and without their text. Only the answer of a
    beam search cannot be cut like this: its text comes whole.

    The index counts the tokens of all choices of a request together; :meth:`Chunk.runs` tells
    which of a chunk's tokens and text are whose.

    Args:
        request_id: which request.
        log: reads its log.
        subscriber: the process's one pub/sub connection.
        heartbeat: reports readers of requests that end when their last reader leaves.
        keys: names of the shard.
        from_index: the first token wanted, 0 or more.
        from_digest: :attr:`digest` of the stream that was read before, if known; the stream then
            notices tokens that contradict what was read before.
        timeout: longest wait for the next chunk in seconds; None waits without limit.
    """

    __slots__ = (
        "__weakref__",
        "_cleanup",
        "_closed",
        "_digest",
        "_expires_at",
        "_heartbeat",
        "_id",
        "_inbox",
        "_keys",
        "_leave",
        "_left",
        "_log",
        "_merger",
        "_needs_reader",
        "_read_log",
        "_subscriber",
        "_subscription",
        "_timeout",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        *,
        log: LogReader,
        subscriber: Subscriber,
        heartbeat: ReaderHeartbeat,
        keys: Keys,
        from_index: int = 0,
        from_digest: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self._id = request_id
        self._log = log
        self._subscriber = subscriber
        self._heartbeat = heartbeat
        self._keys = keys
        self._inbox: str | None = None
        self._timeout = timeout
        self._expires_at: float | None = None  # by the event loop's clock
        self._merger = Merger(request_id, from_index, from_digest)
        self._subscription: Subscription | None = None
        self._leave: Callable[[], None] | None = None
        self._cleanup: weakref.finalize[..., TokenStream] | None = None
        self._digest = self._merger.digest
        self._read_log = True
        self._needs_reader = False
        self._closed = False  # nothing more will be read
        self._left = False  # nothing more will be handed out

    @property
    def id(self) -> str:
        """The request's id."""
        return self._id

    @property
    def index(self) -> int:
        """One past the last token yielded: where to resume."""
        return self._merger.ready[0].start if self._merger.ready else self._merger.index

    @property
    def digest(self) -> int | None:
        """Rolling digest of all tokens before :attr:`index`; None while it is not known."""
        return self._digest if self._merger.ready else self._merger.digest

    @property
    def end(self) -> End | None:
        """The terminal event; None until the iteration has ended by itself."""
        return None if self._merger.ready else self._merger.end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            StopAsyncIteration: the request has ended, or the stream was closed.
            UnknownRequest: no such request.
            StreamDiverged: the log contradicts tokens that were yielded.
            StreamError: the log lacks tokens that were not yielded yet.
            InvalidRequest: the request ended before ``from_index``.
            RedisUnavailable: see :class:`Producer`.
            TimeoutError: no chunk within ``timeout``; the iteration may continue after it.
        """
        merger = self._merger
        deadline = None if self._timeout is None else _now() + self._timeout
        try:
            # Not split into coroutines: every token of every stream passes through here.
            while not merger.ready and not self._closed:
                if self._read_log or self._subscription is None:
                    await self._take_page_by(deadline)
                elif await self._subscription.wait(_earlier(deadline, self._expires_at)):
                    self._take_messages(self._subscription.take())
                elif deadline is not None and _now() >= deadline:
                    raise self._late()
                else:
                    self._expires_at, self._read_log = None, True
        except (StreamError, InvalidRequest):
            self._close()
            raise
        if self._left or not merger.ready:
            raise StopAsyncIteration
        chunk = merger.ready.popleft()
        self._digest = chunk.digest
        return chunk

    async def collect(self) -> Result:
        """Read to the end and return everything from ``from_index`` on, whatever the state."""
        chunks = [chunk async for chunk in self]
        if self._merger.end is None:
            raise StreamError(f"the stream of {self._id!r} was closed before it ended")
        return Result(
            id=self._id,
            choices=gather_choices(chunks, self._merger.end),
            end=self._merger.end,
            prompt_logprobs=chunks[0].prompt_logprobs if chunks else (),
            packed_value=chunks[0].result if chunks else b"",
        )

    async def aclose(self) -> None:
        """Leave the stream; the request runs on. Repeating it is harmless."""
        self._left = True
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _take_messages(self, messages: list[bytes] | None) -> None:
        """Merge what the channel brought; if something is missing, the log is read next."""
        self._read_log = messages is None or not self._merge(messages)
        if self._merger.end is not None:
            self._close()

    def _merge(self, messages: list[bytes]) -> bool:
        try:
            for message in messages:
                if not self._merger.add(unpack_event(message)):
                    return False
        except (StreamError, InvalidRequest):
            return False  # anyone may publish; only the log counts
        return True

    def _late(self) -> TimeoutError:
        return TimeoutError(f"no token of request {self._id!r} within {self._timeout:g} s")

    async def _take_page_by(self, deadline: float | None) -> None:
        """Merge a page of the log; subscribe after the last one."""
        try:
            async with asyncio.timeout_at(deadline):
                # A cancelled read leaves the flag set, so that the next call reads again.
                self._read_log = await self._take_page()
        except TimeoutError:
            raise self._late() from None
        if self._merger.end is not None:
            self._close()
        elif not self._read_log and self._subscription is None:
            self._subscribe()

    async def _take_page(self) -> bool:
        """Merge a page of the log; True if there is another."""
        page = await self._log.read(self._id, self._merger.index)
        self._needs_reader, self._inbox = page.needs_reader, page.inbox
        if self._merger.add_page(page):
            return True
        if self._merger.end is not None:
            return False
        return await self._expire(page.time_left_ms)

    async def _expire(self, time_left_ms: int | None) -> bool:
        """Note when the request expires; end it if that was a while ago. True: it has ended."""
        if time_left_ms is None:
            return False
        left_s = time_left_ms / 1000 + _EXPIRY_GRACE_S
        if left_s <= 0:
            return await self._log.expire(self._id)
        self._expires_at = _now() + left_s
        return False

    def _subscribe(self) -> None:
        self._subscription = (
            self._subscriber.open(self._keys.channel(self._id))
            if self._inbox is None
            else self._subscriber.open_inbox(self._keys.inbox(self._inbox), self._id)
        )
        # Not a method of the stream, which would keep the stream alive.
        leave = functools.partial(self._subscriber.close, self._subscription)
        if self._needs_reader:
            registration = self._heartbeat.register(self._id)
            leave = functools.partial(_leave, leave, self._heartbeat, registration)
        self._leave = leave
        self._cleanup = weakref.finalize(self, _drop, asyncio.get_running_loop(), leave)
        self._cleanup.atexit = False

    def _close(self) -> None:
        self._closed = True
        if self._leave is not None:
            self._leave()
        if self._cleanup is not None:
            self._cleanup.detach()


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _leave(
    unsubscribe: Callable[[], None], heartbeat: ReaderHeartbeat, registration: Registration
) -> None:
    unsubscribe()
    heartbeat.unregister(registration)


def _drop(loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
    # Garbage collection may run in any thread, and after the loop has ended.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(leave)

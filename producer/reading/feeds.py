"""The feeds of a process: one inbox, one timer and one reader of logs for all of them."""

from __future__ import annotations

import asyncio
import logging

from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.local.tasks import end_tasks

from .feed import Feed, FeedReader
from .log_reader import LogReader, Page
from .reader_heartbeat import ReaderHeartbeat
from .subscriber import Subscriber

__all__ = ["Feeds"]

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_PAGES_PER_READ = 32
_LOOKS_PER_READ = 256
_SILENCE_S = 1.0
_LONGEST_SILENCE_S = 4.0
_EXPIRY_GRACE_S = 0.25
"""How long after a deadline a reader waits for a worker to end the request."""


class _Anchor:
    """Keeps the inbox subscribed while no feed is open."""

    request_id: bytes | None = b""

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.closed = False

    def push(self, event: bytes) -> None:
        """No request has this id."""

    def fall_behind(self) -> None:
        """Nothing is read."""

    def fail(self, error: Exception) -> None:
        """The next feed opens another one."""

    def close(self) -> None:
        """The channel is refused."""
        self.closed = True


class Feeds:
    """Opens feeds and keeps them going.

    Args:
        inbox: the inbox of this client.
        keys: names of the shard.
        log: reads logs.
        subscriber: the process's one pub/sub connection.
        heartbeat: reports readers of requests that end when their last reader leaves.
    """

    def __init__(
        self,
        inbox: str,
        keys: Keys,
        log: LogReader,
        subscriber: Subscriber,
        heartbeat: ReaderHeartbeat,
    ) -> None:
        self._keys = keys
        self._channel = keys.inbox(inbox).encode()
        self._log = log
        self._subscriber = subscriber
        self._heartbeat = heartbeat
        self._anchor: _Anchor | None = None
        self._open: set[Feed] = set()
        self._behind: dict[Feed, None] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self, request_id: str, *, attended: bool = False) -> Feed:
        """A feed of a request that is submitted next, or exists; see :meth:`Feed.start`.

        Args:
            request_id: the request.
            attended: it is submitted next, ends when its last reader leaves, and the submission
                brings the first heartbeat. The next ones do not wait for its reply.
        """
        if self._anchor is None or self._anchor.closed:
            self._anchor = _Anchor(self._channel)
            self._subscriber.attach(self._anchor)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="penstock-feeds")
        feed = Feed(request_id, self._channel, catch_up=self._queue, on_close=self._forget)
        self._subscriber.attach(feed)
        self._open.add(feed)
        if attended:
            feed.registration = self._heartbeat.register(request_id, is_known=True)
        return feed

    def start(
        self,
        feed: Feed,
        reader: FeedReader,
        *,
        index: int = 0,
        is_new: bool,
        time_left_ms: int | None = None,
    ) -> None:
        """Hand out chunks from now on.

        Args:
            feed: made by :meth:`open`.
            reader: gets the chunks.
            index: the first token wanted.
            is_new: the request was accepted after the feed was opened.
            time_left_ms: of a new request: until it expires.
        """
        if time_left_ms is not None:
            feed.expires_at = _now() + time_left_ms / 1000 + _EXPIRY_GRACE_S
        feed.start(reader, index=index, is_new=is_new)

    def is_read(self, request_id: str) -> bool:
        """Whether a reader here says that a request has one."""
        return self._heartbeat.has_reader(request_id)

    async def hold(self, feed: Feed, grace_ms: int) -> None:
        """Let a feed's request go on without a reader for so long; see :class:`ReaderHeartbeat`."""
        await self._heartbeat.hold(feed.id, grace_ms)

    async def aclose(self) -> None:
        """End; open feeds fail."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        self._fail_all(RuntimeError("this producer is closed"))

    def _fail_all(self, error: Exception) -> None:
        for feed in list(self._open):
            feed.fail(error)

    def _queue(self, feed: Feed) -> None:
        self._behind[feed] = None
        self._work.set()

    def _forget(self, feed: Feed) -> None:
        self._open.discard(feed)
        self._behind.pop(feed, None)
        self._subscriber.detach(feed)
        if feed.registration is not None:
            self._heartbeat.unregister(feed.registration)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._catch_up())
                group.create_task(self._watch())
        except* Exception as failed:
            _log.exception("feeds cannot be read on")
            self._fail_all(failed.exceptions[0])

    async def _catch_up(self) -> None:
        """Read the logs of all feeds that are behind, many in one round trip."""
        while True:
            if not self._behind:
                self._work.clear()
                await self._work.wait()
            feeds = list(self._behind)[:_PAGES_PER_READ]
            for feed in feeds:
                del self._behind[feed]
            wanted = [feed.begin_page() for feed in feeds]
            pages: list[Page | PenstockError]
            try:
                pages = await self._log.read_many(wanted)
            except PenstockError as error:
                feeds += self._behind  # the others would wait as long for the same
                self._behind.clear()
                pages = [error] * len(feeds)
            for feed, page in zip(feeds, pages, strict=True):
                if isinstance(page, PenstockError):
                    feed.fail(page)
                elif not feed.closed:
                    await self._take(feed, page)

    async def _take(self, feed: Feed, page: Page) -> None:
        if page.end is None and not page.more and await self._is_over(feed, page.time_left_ms):
            (feed_page,) = await self._log.read_many([feed.begin_page()])
            if isinstance(feed_page, PenstockError):
                feed.fail(feed_page)
                return
            page = feed_page
        feed.take_page(page)
        if not feed.closed:
            self._move(feed, page.inbox)
        if page.needs_reader and feed.registration is None and not feed.closed:
            feed.registration = self._heartbeat.register(feed.id)

    def _move(self, feed: Feed, inbox: str | None) -> None:
        """Let a feed listen where its request is published: perhaps for another gateway."""
        name = self._keys.channel(feed.id) if inbox is None else self._keys.inbox(inbox)
        if name.encode() == feed.channel:
            return
        self._subscriber.detach(feed)
        feed.channel = name.encode()
        feed.request_id = None if inbox is None else feed.id.encode()
        self._subscriber.attach(feed)
        feed.fall_behind()  # for what came before

    async def _is_over(self, feed: Feed, time_left_ms: int | None) -> bool:
        """Note when a request expires, and end it if that was a while ago."""
        if time_left_ms is None:
            return False
        left_s = time_left_ms / 1000 + _EXPIRY_GRACE_S
        if left_s > 0:
            feed.expires_at = _now() + left_s
            return False
        return await self._log.expire(feed.id)

    async def _watch(self) -> None:
        """Look after silent feeds, and those whose time is over."""
        while True:
            await asyncio.sleep(_TICK_S)
            now, silent = _now(), []
            for feed in list(self._open):
                if feed.heard:
                    feed.heard, feed.silence_s = False, _SILENCE_S
                    feed.look_at = now + _SILENCE_S
                elif now >= feed.look_at:
                    feed.silence_s = min(2 * feed.silence_s, _LONGEST_SILENCE_S)
                    feed.look_at = now + feed.silence_s
                    silent.append(feed)
                if feed.expires_at is not None and now >= feed.expires_at:
                    feed.expires_at = None
                    feed.fall_behind()
            for start in range(0, len(silent), _LOOKS_PER_READ):
                await self._look_at(silent[start : start + _LOOKS_PER_READ])

    async def _look_at(self, feeds: list[Feed]) -> None:
        """Send feeds to the log whose requests have gone on without them."""
        try:
            looks = await self._log.look_at([feed.id for feed in feeds])
        except PenstockError:
            for feed in feeds:
                feed.fall_behind()  # reading fails, too, if it must
            return
        for feed, look in zip(feeds, looks, strict=True):
            if look.has_ended or look.tokens > feed.index:
                feed.fall_behind()
            elif look.time_left_ms is not None:
                feed.expires_at = _now() + look.time_left_ms / 1000 + _EXPIRY_GRACE_S


def _now() -> float:
    return asyncio.get_running_loop().time()

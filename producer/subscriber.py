"""One pub/sub connection for all streams of a process.

The channel is only a fast copy of the log, so this module may lose messages and says so when it
did: a subscription that missed something is *behind*, and its owner reads the log. A subscription
is behind whenever the server has confirmed it (what was published before is not on the channel),
which covers the first subscription and every reconnection alike, and when its buffer ran over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import ProtocolError, RedisUnavailable
from penstock.shared.events import unpack_letter

__all__ = ["Subscriber", "Subscription"]

_log = logging.getLogger(__name__)

_BUFFER = 256
_PING_AFTER_S = 5.0
_BACKOFF_S = (0.02, 1.0)


class Subscription:
    """One reader of one channel, or of one request in an inbox. Ended by :meth:`Subscriber.close`.

    Nearly every token of a stream is waited for, so waiting must cost little: no timer is made
    and cancelled for each. One alarm goes off when the time of silence may be over, and is put
    off if news has come meanwhile.

    Args:
        channel: the channel's name.
        request_id: in an inbox, the request whose events are wanted; else None.
        behind: whether the reader has to read the log before anything else.
    """

    __slots__ = (
        "__weakref__", "_alarm", "_behind", "_error", "_messages", "_silent_at", "_waiter",
        "channel", "request_id",
    )  # fmt: skip

    def __init__(self, channel: bytes, request_id: bytes | None, *, behind: bool) -> None:
        self.channel = channel
        self.request_id = request_id
        self._messages: list[bytes] = []
        self._behind = behind
        self._error: RedisUnavailable | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._silent_at = 0.0

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` has something to say."""
        return bool(self._messages) or self._behind or self._error is not None

    async def wait(self, silence_s: float) -> bool:
        """Wait until :meth:`take` has something to say; False: it had not for ``silence_s``.

        Raises:
            RuntimeError: another task waits already.
        """
        if self.has_news:
            return True
        if self._waiter is not None:
            raise RuntimeError("a stream can be read by one task at a time")
        loop = asyncio.get_running_loop()
        self._silent_at = loop.time() + silence_s
        if self._alarm is None:
            self._alarm = loop.call_at(self._silent_at, self._ring)
        elif self._alarm.when() > self._silent_at:
            self._alarm.cancel()
            self._alarm = loop.call_at(self._silent_at, self._ring)
        self._waiter = loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _ring(self) -> None:
        self._alarm = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # nobody waits; who waits next sets it again
        loop = waiter.get_loop()
        if loop.time() >= self._silent_at:
            waiter.set_result(False)
        else:
            self._alarm = loop.call_at(self._silent_at, self._ring)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def take(self) -> tuple[list[bytes], bool]:
        """The messages that came since the last call, and whether some may be missing.

        If so, the messages are to be thrown away and the log is to be read.

        Raises:
            RedisUnavailable: the server refuses the subscription.
        """
        if self._error is not None:
            raise self._error
        messages, self._messages = self._messages, []
        behind, self._behind = self._behind, False
        return messages, behind

    def push(self, message: bytes) -> None:
        """Store a message; on overflow all are dropped and the subscription falls behind."""
        if len(self._messages) >= _BUFFER:
            self.fall_behind()
        elif not self._behind:
            self._messages.append(message)
            self._wake()

    def fall_behind(self) -> None:
        """Drop what is stored and send the reader to the log."""
        self._messages.clear()
        self._behind = True
        self._wake()

    def fail(self, error: RedisUnavailable) -> None:
        """Let the reader raise this error."""
        self._error = error
        self._wake()


class Subscriber:
    """Shares one pub/sub connection among any number of subscriptions.

    The connection is made with the first subscription and made again, with growing pauses, when
    it breaks or stays silent although it was pinged. It is not taken from the client's pool.

    Args:
        redis: the client whose connection parameters are used.

    Attributes:
        connections: how often a connection was made.
    """

    def __init__(self, redis: Redis) -> None:
        pool = redis.connection_pool
        # Reconnecting is decided here alone: a retry inside redis-py would be done by whichever
        # of reader and writer fails first, under the other's feet.
        parameters = {
            **pool.connection_kwargs,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "retry_on_timeout": False,
            "health_check_interval": 0,
        }
        self._pool = ConnectionPool(connection_class=pool.connection_class, **parameters)
        self._redis = Redis(connection_pool=self._pool)
        self._readers: dict[bytes, set[Subscription]] = {}
        # Those of them that read one request each, by inbox and request.
        self._inboxes: dict[bytes, dict[bytes, set[Subscription]]] = {}
        self._sent: set[bytes] = set()
        self._confirmed: set[bytes] = set()
        self._changed: set[bytes] = set()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pause_s = _BACKOFF_S[0]
        self._closed = False
        self.connections = 0

    @property
    def channels(self) -> int:
        """Channels with at least one reader."""
        return len(self._readers)

    def open(self, channel: str) -> Subscription:
        """Subscribe to a channel. Returns at once; the confirmation lets the reader fall behind."""
        return self._open(channel, None)

    def open_inbox(self, channel: str, request_id: str) -> Subscription:
        """The same for one request's events in the channel of an inbox."""
        return self._open(channel, request_id.encode())

    def _open(self, channel: str, request_id: bytes | None) -> Subscription:
        name = channel.encode()
        subscription = Subscription(name, request_id, behind=name in self._confirmed)
        if request_id is not None:
            self._inboxes.setdefault(name, {}).setdefault(request_id, set()).add(subscription)
        self._readers.setdefault(name, set()).add(subscription)
        self._touch(name)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="penstock-subscriber")
        return subscription

    def close(self, subscription: Subscription) -> None:
        """End a subscription; the channel's last one unsubscribes it. Again is harmless."""
        readers = self._readers.get(subscription.channel)
        if readers is None:
            return
        readers.discard(subscription)
        if subscription.request_id is not None:
            self._leave_inbox(subscription.channel, subscription.request_id, subscription)
        if not readers:
            del self._readers[subscription.channel]
            self._touch(subscription.channel)

    def _leave_inbox(self, channel: bytes, request_id: bytes, subscription: Subscription) -> None:
        inbox = self._inboxes.get(channel, {})
        readers = inbox.get(request_id, set())
        readers.discard(subscription)
        if not readers:
            inbox.pop(request_id, None)
        if not inbox:
            self._inboxes.pop(channel, None)

    async def aclose(self) -> None:
        """End the connection; open subscriptions hear nothing more."""
        # Not by cancelling alone: asyncio.wait_for of Python 3.11, which redis-py sends with, can
        # swallow a cancellation.
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._redis.aclose()
        await self._pool.aclose()

    def _touch(self, channel: bytes) -> None:
        self._changed.add(channel)
        self._work.set()

    async def _run(self) -> None:
        while not self._closed:
            try:
                await self._connect_and_serve()
            except* (RedisConnectionError, RedisTimeoutError, OSError) as group:
                _log.warning("pub/sub connection lost: %s", group.exceptions[0])
            except* Exception as group:
                _log.exception("pub/sub reader failed")
                self._fail_unconfirmed(group.exceptions[0])
            self._confirmed.clear()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _BACKOFF_S[1])

    async def _connect_and_serve(self) -> None:
        while not self._readers:
            self._work.clear()
            await self._work.wait()
        async with self._redis.pubsub() as pubsub:
            self._changed.clear()
            self._sent = set(self._readers)
            await pubsub.subscribe(*self._sent)
            self.connections += 1
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(pubsub))
                group.create_task(self._write(pubsub))

    async def _write(self, pubsub: Any) -> None:
        """Bring the server's list of our channels up to date, in one command for many."""
        while not self._closed:
            await self._work.wait()
            self._work.clear()
            changed, self._changed = self._changed, set()
            new = [name for name in changed if name in self._readers and name not in self._sent]
            old = [name for name in changed if name not in self._readers and name in self._sent]
            if new:
                self._sent.update(new)
                await pubsub.subscribe(*new)
            if old:
                self._sent.difference_update(old)
                self._confirmed.difference_update(old)
                await pubsub.unsubscribe(*old)

    async def _read(self, pubsub: Any) -> None:
        pinged = False
        while not self._closed:
            try:
                message = await pubsub.get_message(timeout=_PING_AFTER_S)
            except ResponseError as error:
                self._fail_unconfirmed(error)
                continue
            if message is None:
                if pinged:
                    raise RedisConnectionError("no answer to a ping; the connection is dead")
                await pubsub.ping()
                pinged = True
                continue
            pinged = False
            kind, channel = message["type"], message["channel"]
            if kind == "message":
                inbox = self._inboxes.get(channel)
                if inbox is not None:
                    _deliver(inbox, message["data"])
                    continue
                for subscription in self._readers.get(channel, ()):
                    subscription.push(message["data"])
            elif kind == "subscribe":
                self._pause_s = _BACKOFF_S[0]
                if channel in self._sent:  # not since unsubscribed
                    self._confirmed.add(channel)
                for subscription in self._readers.get(channel, ()):
                    subscription.fall_behind()

    def _fail_unconfirmed(self, error: BaseException) -> None:
        text = f"Redis refuses to subscribe: {error}"
        if isinstance(error, RedisError) and "NOPERM" in str(error).upper():
            text += "; the user needs +subscribe and the channels, see docs/protocol.md"
        for channel, readers in self._readers.items():
            if channel not in self._confirmed:
                for subscription in readers:
                    subscription.fail(RedisUnavailable(text))


def _deliver(inbox: Mapping[bytes, Collection[Subscription]], message: bytes) -> None:
    """Hand the events of one message to their readers.

    What is no such message is dropped: anyone may publish, and what a reader misses is in the log.
    """
    try:
        for request_id, event in unpack_letter(message):
            for subscription in inbox.get(request_id, ()):
                subscription.push(event)
    except ProtocolError:
        _log.warning("a message in an inbox is not readable: %r", message[:80])

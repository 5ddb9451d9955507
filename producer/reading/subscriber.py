"""One pub/sub connection for all streams of a process.

The channel is only a fast copy of the log, so this module may lose messages, and reports it. A
subscription that may have missed something is *behind*: its owner reads the log. A subscription is
behind whenever the server confirms it, because messages published earlier are not on the channel.
This covers the first subscription and every reconnection. It is also behind when its buffer
overflows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import ProtocolError, RedisUnavailable
from penstock.shared.local.tasks import end_tasks
from penstock.shared.protocol.event_reader import unpack_letter
from penstock.shared.redis.channel_connection import ChannelConnection

from .subscription import Subscription

__all__ = ["Listener", "Subscriber"]

_log = logging.getLogger(__name__)

_BACKOFF_S = (0.02, 1.0)


class Listener(Protocol):
    """What reads a channel.

    Attributes:
        channel: the channel's name.
        request_id: in an inbox, the request whose events are wanted; else None.
    """

    channel: bytes
    request_id: bytes | None

    def push(self, event: bytes) -> None:
        """A message came."""

    def fall_behind(self) -> None:
        """Messages may have been lost."""

    def fail(self, error: Exception) -> None:
        """No message will come."""

    def close(self) -> None:
        """Nothing will be called any more."""


class Subscriber:
    """Shares one pub/sub connection among any number of subscriptions.

    The first subscription opens the connection. It is opened again, with growing pauses, when it
    breaks or does not answer a ping. It does not come from the client's pool.

    Args:
        redis: the client whose connection parameters are used.
        ping_after_s: seconds of silence before the subscriber pings the server, and then before
            the connection counts as dead.

    Attributes:
        connections: how many connections were opened.
    """

    def __init__(self, redis: Redis, *, ping_after_s: float = 5.0) -> None:
        self._redis = redis
        self._ping_after_s = ping_after_s
        self._readers: dict[bytes, set[Listener]] = {}
        # Those that read one request each, by inbox and request. Tuples, because a listener may
        # leave while it gets an event.
        self._inboxes: dict[bytes, dict[bytes, tuple[Listener, ...]]] = {}
        self._sent: set[bytes] = set()
        self._confirmed: set[bytes] = set()
        # Channels refused together with others: it is not known which of them is denied.
        self._doubtful: set[bytes] = set()
        self._changed: set[bytes] = set()
        self._work = asyncio.Event()
        self._received = False
        self._ping = False
        self._task: asyncio.Task[None] | None = None
        self._pause_s = _BACKOFF_S[0]
        self._closed = False
        self.connections = 0

    @property
    def channels(self) -> int:
        """Channels with at least one reader."""
        return len(self._readers)

    def open(self, channel: str) -> Subscription:
        """Subscribe to a channel. Returns at once; the confirmation sets the reader behind."""
        return self._open(channel, None)

    def open_inbox(self, channel: str, request_id: str) -> Subscription:
        """Subscribe to one request's events in an inbox's channel."""
        return self._open(channel, request_id.encode())

    def _open(self, channel: str, request_id: bytes | None) -> Subscription:
        name = channel.encode()
        subscription = Subscription(name, request_id, behind=name in self._confirmed)
        self.attach(subscription)
        return subscription

    def attach(self, listener: Listener) -> None:
        """Subscribe to a listener's channel. Returns at once; the confirmation sets it behind."""
        name, request_id = listener.channel, listener.request_id
        if request_id is not None:
            inbox = self._inboxes.setdefault(name, {})
            inbox[request_id] = (*inbox.get(request_id, ()), listener)
        readers = self._readers.get(name)
        if readers is None:
            self._readers[name] = {listener}
            self._touch(name)
        else:
            readers.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="penstock-subscriber")

    def close(self, subscription: Subscription) -> None:
        """End a subscription; see :meth:`detach`."""
        subscription.close()
        self.detach(subscription)

    def detach(self, listener: Listener) -> None:
        """Forget a listener; the channel's last one unsubscribes. Repeating it is harmless."""
        readers = self._readers.get(listener.channel)
        if readers is None:
            return
        readers.discard(listener)
        if listener.request_id is not None:
            self._leave_inbox(listener.channel, listener.request_id, listener)
        if not readers:
            del self._readers[listener.channel]
            self._touch(listener.channel)

    def _leave_inbox(self, channel: bytes, request_id: bytes, listener: Listener) -> None:
        inbox = self._inboxes.get(channel, {})
        others = tuple(one for one in inbox.get(request_id, ()) if one is not listener)
        if others:
            inbox[request_id] = others
        else:
            inbox.pop(request_id, None)
        if not inbox:
            self._inboxes.pop(channel, None)

    async def aclose(self) -> None:
        """Close the connection; readers of open subscriptions get an error."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        for listener in [one for readers in self._readers.values() for one in readers]:
            listener.fail(RuntimeError("this producer is closed"))
            listener.close()

    def _touch(self, channel: bytes) -> None:
        self._changed.add(channel)
        self._work.set()

    async def _run(self) -> None:
        while not self._closed:
            try:
                await self._connect_and_serve()
            except* (RedisConnectionError, RedisTimeoutError, OSError) as group:
                again = self._pause_s > _BACKOFF_S[0]  # one warning per outage is enough
                level = logging.INFO if again else logging.WARNING
                _log.log(level, "pub/sub connection lost: %s", group.exceptions[0])
            except* Exception as group:
                _log.exception("pub/sub reader failed")
                unconfirmed = self._readers.keys() - self._confirmed
                self._fail(unconfirmed, group.exceptions[0])
            self._confirmed.clear()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _BACKOFF_S[1])

    async def _connect_and_serve(self) -> None:
        while not self._readers:
            self._work.clear()
            await self._work.wait()
        connection = ChannelConnection(self._redis)
        try:
            await connection.connect()
            self._changed.clear()
            self._doubtful.clear()
            self._sent = set(self._readers)
            if self._sent:  # the last reader may have left meanwhile
                await connection.send("SUBSCRIBE", *self._sent)
            self.connections += 1
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(connection))
                group.create_task(self._write(connection))
                group.create_task(self._watch())
        finally:
            await connection.aclose()

    async def _write(self, connection: ChannelConnection) -> None:
        """Send changes of the subscribed channels, many in one command."""
        while not self._closed:
            await self._work.wait()
            self._work.clear()
            changed, self._changed = self._changed, set()
            new = [name for name in changed if name in self._readers and name not in self._sent]
            old = [name for name in changed if name not in self._readers and name in self._sent]
            alone = self._doubtful.intersection(new)
            self._sent.update(new)
            for name in alone:
                self._doubtful.discard(name)
                await connection.send("SUBSCRIBE", name)
            if together := [name for name in new if name not in alone]:
                await connection.send("SUBSCRIBE", *together)
            if old:
                self._sent.difference_update(old)
                self._confirmed.difference_update(old)
                await connection.send("UNSUBSCRIBE", *old)
            if self._ping:
                self._ping = False
                await connection.send("PING")

    async def _watch(self) -> None:
        """Ping a silent server; if it does not answer, the connection is dead."""
        while not self._closed:
            self._received = False
            await asyncio.sleep(self._ping_after_s)
            if self._received:
                continue
            self._ping = True
            self._work.set()
            await asyncio.sleep(self._ping_after_s)
            if not self._received:
                raise RedisConnectionError("no answer to a ping; the connection is dead")

    async def _read(self, connection: ChannelConnection) -> None:
        while not self._closed:
            try:
                message = await connection.receive()
            except ResponseError as error:
                self._received = True
                self._handle_refusal(error, *connection.refused())
                continue
            self._received = True
            if type(message) is not list or len(message) != 3:
                connection.answered()  # a ping
                continue
            kind, channel, data = message
            if kind == b"message":
                inbox = self._inboxes.get(channel)
                if inbox is not None:
                    _deliver(inbox, data)
                    continue
                for listener in self._readers.get(channel, ()):
                    listener.push(data)
                continue
            connection.answered()
            if kind == b"subscribe":
                self._pause_s = _BACKOFF_S[0]
                if channel in self._sent:  # not since unsubscribed
                    self._confirmed.add(channel)
                for listener in self._readers.get(channel, ()):
                    listener.fall_behind()

    def _handle_refusal(
        self, error: ResponseError, command: str, channels: Sequence[bytes]
    ) -> None:
        if command != "SUBSCRIBE":
            _log.info("Redis refuses %s: %s", command, error)
        elif len(channels) == 1:
            self._fail(channels, error)
        else:
            # One denied channel refuses the whole command. Sent alone, each gets its own answer.
            self._sent.difference_update(channels)
            self._doubtful.update(channels)
            self._changed.update(channels)
            self._work.set()

    def _fail(self, channels: Iterable[bytes], error: BaseException) -> None:
        """Fail the readers of these channels; later connections do not subscribe to them."""
        text = f"Redis refuses to subscribe: {error}"
        if isinstance(error, NoPermissionError):
            text += "; the user needs +subscribe and the channels, see docs/protocol.md"
        for channel in channels:
            self._sent.discard(channel)
            self._inboxes.pop(channel, None)
            for listener in self._readers.pop(channel, ()):
                listener.fail(RedisUnavailable(text))
                listener.close()


def _deliver(inbox: Mapping[bytes, Collection[Listener]], message: bytes) -> None:
    """Deliver the events of one inbox message to their readers.

    Malformed messages are dropped: anyone may publish, and the log has what a reader misses.
    """
    try:
        for request_id, event in unpack_letter(message):
            for listener in inbox.get(request_id, ()):
                listener.push(event)
    except ProtocolError:
        _log.warning("a message in an inbox is malformed: %r", message[:80])

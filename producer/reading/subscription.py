"""One reader's end of a channel: its new messages, and whether some may be missing."""

from __future__ import annotations

import asyncio

from penstock.shared.redis.retrying_client import check_loop

__all__ = ["Subscription"]

_BUFFER = 256
_SILENCE_S = 1.0
_LONGEST_SILENCE_S = 4.0


class Subscription:
    """One reader of one channel, or of one request in an inbox. Ended by :meth:`Subscriber.close`.

    A reader is *behind* when the channel may have lost something, and then reads the log. A second
    of silence counts as a possible loss. If the silence goes on, the interval doubles up to four
    seconds.

    A stream waits for nearly every token, so waiting must cost little: no coroutine, and no new
    timer per wait. A timer that fires too early is set again.

    Args:
        channel: the channel's name.
        request_id: in an inbox, the request whose events are wanted; else None.
        behind: whether the reader must read the log first.
    """

    __slots__ = (
        "__weakref__",
        "_behind",
        "_deadline",
        "_deadline_timer",
        "_error",
        "_loop",
        "_messages",
        "_received_at",
        "_silence_s",
        "_silence_timer",
        "_waiter",
        "channel",
        "request_id",
    )  # fmt: skip

    def __init__(self, channel: bytes, request_id: bytes | None, *, behind: bool) -> None:
        self.channel = channel
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._messages: list[bytes] = []
        self._behind = behind
        self._error: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._received_at = self._loop.time()
        self._silence_s = _SILENCE_S
        self._silence_timer = self._loop.call_later(_SILENCE_S, self._on_silence)

    def wait(self, deadline: float | None = None) -> asyncio.Future[bool]:
        """Return a future: True once :meth:`take` has something, False at the deadline.

        A caller that stops waiting cancels the future, as a cancelled task does by itself.

        Args:
            deadline: a time of the event loop's clock; None waits without limit.

        Raises:
            RuntimeError: another task waits already, or this is another event loop.
        """
        check_loop(self._loop)
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("a stream can be read by one task at a time")
        waiter = self._waiter = asyncio.Future(loop=self._loop)
        if self._messages or self._behind or self._error is not None:
            waiter.set_result(True)
        elif deadline is not None:
            self._deadline = deadline
            if self._deadline_timer is None or self._deadline_timer.when() > deadline:
                self._set_deadline_timer()
        return waiter

    def _set_deadline_timer(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer = self._loop.call_at(self._deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # the next wait sets it again
        if self._loop.time() >= self._deadline:
            waiter.set_result(False)
        else:
            self._set_deadline_timer()

    def _on_silence(self) -> None:
        due = self._received_at + self._silence_s
        now = self._loop.time()
        if now >= due:
            self._silence_s = min(2 * self._silence_s, _LONGEST_SILENCE_S)
            due = now + self._silence_s
            self.fall_behind()
        self._silence_timer = self._loop.call_at(due, self._on_silence)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def take(self) -> list[bytes] | None:
        """The messages since the last call; None: some may be missing, so read the log.

        Raises:
            RedisUnavailable: the server refuses the subscription.
            RuntimeError: the subscriber was closed.
        """
        if self._error is not None:
            raise self._error
        if self._behind:
            self._behind = False
            return None
        messages, self._messages = self._messages, []
        return messages

    def push(self, message: bytes) -> None:
        """Store a message; an overflow drops all and sets the reader behind."""
        self._received_at = self._loop.time()
        self._silence_s = _SILENCE_S
        if len(self._messages) >= _BUFFER:
            self.fall_behind()
        elif not self._behind:
            self._messages.append(message)
            self._wake()

    def fall_behind(self) -> None:
        """Drop the stored messages and send the reader to the log."""
        self._messages.clear()
        self._behind = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make the reader raise this error."""
        self._error = error
        self._wake()

    def close(self) -> None:
        """End the subscription and wake its waiter."""
        self._silence_timer.cancel()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._wake()

"""One reader's end of a channel: what came since it last looked, and whether it came whole."""

from __future__ import annotations

import asyncio

from penstock.shared.redis.retrying_client import check_loop

__all__ = ["Subscription"]

_BUFFER = 256
_SILENCE_S = 1.0
_LONGEST_SILENCE_S = 4.0


class Subscription:
    """One reader of one channel, or of one request in an inbox. Ended by :meth:`Subscriber.close`.

    A reader is *behind* when the channel may have lost something, and then reads the log. A channel
    that stays silent for a second counts as one that may have, and for longer each time that it
    is silent again, up to four.

    Nearly every token of a stream is waited for, so waiting must cost little: no coroutine, and
    no timer that is made and cancelled for each. A timer that goes off too early is set again.

    Args:
        channel: the channel's name.
        request_id: in an inbox, the request whose events are wanted; else None.
        behind: whether the reader has to read the log before anything else.
    """

    __slots__ = (
        "__weakref__", "_alarm", "_behind", "_deadline", "_error", "_heard_at", "_hush", "_loop",
        "_messages", "_silence_s", "_waiter", "channel", "request_id",
    )  # fmt: skip

    def __init__(self, channel: bytes, request_id: bytes | None, *, behind: bool) -> None:
        self.channel = channel
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._messages: list[bytes] = []
        self._behind = behind
        self._error: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._heard_at = self._loop.time()
        self._silence_s = _SILENCE_S
        self._hush = self._loop.call_later(_SILENCE_S, self._note_silence)

    def wait(self, deadline: float | None = None) -> asyncio.Future[bool]:
        """To be awaited until :meth:`take` has something to say; False: it had not by then.

        Who gives up waiting cancels it, as a task does by itself when it is cancelled.

        Args:
            deadline: a time of the event loop; None: as long as it takes.

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
            if self._alarm is None or self._alarm.when() > deadline:
                self._set_alarm()
        return waiter

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # nobody waits; who waits next sets it again
        if self._loop.time() >= self._deadline:
            waiter.set_result(False)
        else:
            self._set_alarm()

    def _note_silence(self) -> None:
        due = self._heard_at + self._silence_s
        now = self._loop.time()
        if now >= due:
            self._silence_s = min(2 * self._silence_s, _LONGEST_SILENCE_S)
            due = now + self._silence_s
            self.fall_behind()
        self._hush = self._loop.call_at(due, self._note_silence)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def take(self) -> list[bytes] | None:
        """The messages that came since the last call; None: some may be missing, read the log.

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
        """Store a message; on overflow all are dropped and the subscription falls behind."""
        self._heard_at = self._loop.time()
        self._silence_s = _SILENCE_S
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

    def fail(self, error: Exception) -> None:
        """Let the reader raise this error."""
        self._error = error
        self._wake()

    def close(self) -> None:
        """Nothing more will come; who waits is let go."""
        self._hush.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        self._wake()

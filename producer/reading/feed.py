"""One request's output, handed to a callback as soon as it arrives. Made by :meth:`Feeds.open`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from penstock.shared.errors import InvalidRequest, PenstockError, StreamError
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End

from .log_reader import Page
from .merge import Merger
from .reader_heartbeat import Registration

__all__ = ["Feed", "FeedReader"]

_log = logging.getLogger(__name__)

_BUFFER = 256


class FeedReader(Protocol):
    """What a feed calls; nothing of it may wait. One of the last two comes once, at the end."""

    def on_chunk(self, chunk: Chunk) -> None:
        """The next tokens, in order, without gap or overlap."""

    def on_end(self, end: End) -> None:
        """The request has ended, and every token before was handed out."""

    def on_failure(self, error: Exception) -> None:
        """The output cannot be read on."""


class Feed:
    """The output of one request.

    A :class:`~..stream.TokenStream` wakes a task for its next chunk. A feed hands out a chunk in
    the same turn of the event loop in which it arrived. It exists before the submission, so a
    request that was just accepted needs no look at its log. The class :class:`Feeds` reads the log
    for all feeds that are *behind*: they did not see the request's beginning, or may have missed
    something.

    Args:
        request_id: the request.
        channel: the inbox in which its events come.
        catch_up: has the log read for this feed.
        on_close: called once, at the end.

    Attributes:
        heard: something came since the last look at it.
        look_at: when :class:`Feeds` looks whether silence is right, by the event loop's clock.
        silence_s: how long it waits then.
        expires_at: when the request is over, by the event loop's clock; None: not known.
        registration: its reader's heartbeat, if the request needs one.
        needs_reader: it does.
    """

    __slots__ = (
        "_behind", "_catch_up", "_held", "_merger", "_on_close", "_paused", "_reader", "channel",
        "closed", "expires_at", "heard", "id", "look_at", "needs_reader", "registration",
        "request_id", "silence_s",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        channel: bytes,
        *,
        catch_up: Callable[[Feed], None],
        on_close: Callable[[Feed], None],
    ) -> None:
        self.id = request_id
        self.request_id: bytes | None = request_id.encode()
        self.channel = channel
        self._catch_up = catch_up
        self._on_close = on_close
        self._reader: FeedReader | None = None
        self._merger = Merger(request_id)
        self._held: list[bytes] | None = []  # events, until it has started and while it reads
        self._behind = False
        self._paused = False
        self.closed = False
        self.heard = True
        self.look_at = 0.0
        self.silence_s = 0.0
        self.expires_at: float | None = None
        self.registration: Registration | None = None
        self.needs_reader = False

    @property
    def index(self) -> int:
        """One past the last token handed out: where to resume."""
        return self._merger.index

    def start(self, reader: FeedReader, *, index: int = 0, is_new: bool) -> None:
        """Hand out chunks from now on.

        Args:
            reader: gets them.
            index: the first token wanted.
            is_new: the request was accepted after this feed was opened.
        """
        self._reader = reader
        if index:
            self._merger = Merger(self.id, index)
        if not is_new:
            self._behind = True
        if self._behind:
            self._catch_up(self)
        else:
            self._take_held()

    def push(self, event: bytes) -> None:
        """An event came on the channel."""
        self.heard = True
        if self._held is not None:
            if len(self._held) < _BUFFER:
                self._held.append(event)
            else:
                self._held.clear()
                self._behind = True
        elif self._behind or self._paused:
            self._behind = True
        elif self._merge(event):
            self._hand_out()
        else:
            self.fall_behind()

    def fall_behind(self) -> None:
        """The channel may have lost something: read the log."""
        if self._behind or self.closed:
            return
        self._behind = True
        if self._reader is not None and self._held is None and not self._paused:
            self._catch_up(self)

    def pause(self) -> None:
        """The reader's client is slow: drop what comes, and read it from the log later."""
        self._paused = True

    def resume(self) -> None:
        """The client has read what there was."""
        self._paused = False
        if self._behind and self._held is None and not self.closed:
            self._catch_up(self)

    def begin_page(self) -> tuple[str, int]:
        """The log is read from here on; what comes meanwhile is kept."""
        self._behind = False
        self._held = []
        return self.id, self._merger.index

    def take_page(self, page: Page) -> None:
        """Hand out a page of the log and what came while it was read."""
        if self.closed:
            return
        try:
            more = self._merger.add_page(page)
        except (StreamError, InvalidRequest) as error:
            self.fail(error)
            return
        self.needs_reader = page.needs_reader
        if not self._hand_out():
            return
        if more or self._behind:
            self._held, self._behind = None, True
            if not self._paused:
                self._catch_up(self)
        else:
            self._take_held()

    def fail(self, error: Exception) -> None:
        """Nothing more can be read."""
        if self.closed:
            return
        self.close()
        if self._reader is not None:
            self._reader.on_failure(error)

    def close(self) -> None:
        """Leave; the request runs on. Repeating it is harmless."""
        if not self.closed:
            self.closed = True
            self._on_close(self)

    def _take_held(self) -> None:
        held, self._held = self._held or [], None
        for event in held:
            if self.closed:
                return
            self.push(event)

    def _merge(self, event: bytes) -> bool:
        try:
            return self._merger.add(unpack_event(event))
        except (StreamError, InvalidRequest):
            return False  # anyone may publish; only the log counts

    def _hand_out(self) -> bool:
        """Hand out what is ready; returns whether the feed goes on."""
        reader, merger = self._reader, self._merger
        assert reader is not None
        try:
            while merger.ready and not self.closed:
                reader.on_chunk(merger.ready.popleft())
            if merger.end is not None and not self.closed:
                self.close()
                reader.on_end(merger.end)
        except PenstockError as error:
            self.fail(error)
        except Exception as error:  # of one reader: the others go on
            _log.exception("the reader of %s failed", self.id)
            self.fail(error)
        return not self.closed

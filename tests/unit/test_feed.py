"""A feed hands out every token once, whatever comes when, and asks for the log when it must."""

from __future__ import annotations

import pytest

from penstock.producer.reading.feed import Feed
from penstock.producer.reading.log_reader import Page
from penstock.shared.errors import StreamError, UnknownRequest
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.states import Reason


def chunk(start: int) -> Chunk:
    """The token ``start`` of a request whose tokens are 0, 1, 2, ..."""
    return Chunk(start, (start,), f"{start} ", rolling_digest(range(start + 1)))


def page(*events: Chunk | End, more: bool = False, known: bool = True) -> Page:
    return Page(known, list(events), more, None, False, "inbox", None)


class Reader:
    """What a feed handed out, and how often it asked for the log."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: End | None = None
        self.error: Exception | None = None
        self.asked = 0
        self.closed = 0
        self.feed = Feed("r", b"inbox", catch_up=self._catch_up, on_close=self._close)

    def _catch_up(self, feed: Feed) -> None:
        self.asked += 1

    def _close(self, feed: Feed) -> None:
        self.closed += 1

    def on_chunk(self, chunk: Chunk) -> None:
        self.tokens += chunk.token_ids

    def on_end(self, end: End) -> None:
        self.end = end

    def on_failure(self, error: Exception) -> None:
        self.error = error

    def push(self, *events: Chunk | End) -> None:
        for event in events:
            self.feed.push(event.pack())

    def read(self, found: Page) -> None:
        self.feed.begin_page()
        self.feed.take_page(found)


END = End(n=3, reason=Reason.LENGTH)


def test_a_new_request_needs_no_log() -> None:
    reader = Reader()
    reader.push(chunk(0))  # before the submission is answered
    reader.feed.start(reader, is_new=True)
    reader.push(chunk(1), chunk(1), chunk(2), END, END)
    assert (reader.tokens, reader.end, reader.asked) == ([0, 1, 2], END, 0)
    assert reader.closed == 1


def test_what_comes_while_the_log_is_read_is_kept() -> None:
    reader = Reader()
    reader.feed.start(reader, is_new=False)
    assert reader.asked == 1
    reader.feed.begin_page()
    reader.push(chunk(1), chunk(2), END)
    assert reader.tokens == []
    reader.feed.take_page(page(chunk(0), chunk(1)))
    assert (reader.tokens, reader.end, reader.asked) == ([0, 1, 2], END, 1)


def test_a_gap_and_a_loss_lead_to_the_log() -> None:
    reader = Reader()
    reader.feed.start(reader, is_new=True)
    reader.push(chunk(1), chunk(2))
    assert (reader.tokens, reader.asked) == ([], 1)
    reader.read(page(chunk(0), more=True))
    assert (reader.tokens, reader.asked) == ([0], 2)
    reader.read(page(chunk(1)))
    reader.feed.fall_behind()
    reader.feed.fall_behind()
    assert (reader.tokens, reader.asked) == ([0, 1], 3)
    reader.read(page(chunk(2), END))
    assert (reader.tokens, reader.end) == ([0, 1, 2], END)


def test_a_slow_client_gets_the_rest_from_the_log() -> None:
    reader = Reader()
    reader.feed.start(reader, is_new=True)
    reader.push(chunk(0))
    reader.feed.pause()
    reader.push(chunk(1), chunk(2), END)
    assert (reader.tokens, reader.asked) == ([0], 0)
    reader.feed.resume()
    assert reader.asked == 1
    reader.read(page(chunk(1), chunk(2), END))
    assert (reader.tokens, reader.end) == ([0, 1, 2], END)


def test_too_much_before_the_start_is_read_from_the_log() -> None:
    reader = Reader()
    for start in range(300):
        reader.push(chunk(start))
    reader.feed.start(reader, is_new=True)
    assert (reader.tokens, reader.asked) == ([], 1)


def test_a_reader_begins_in_the_middle() -> None:
    reader = Reader()
    reader.feed.start(reader, index=2, is_new=False)
    assert reader.feed.begin_page() == ("r", 2)
    reader.feed.take_page(page(chunk(1), chunk(2), END))
    assert (reader.tokens, reader.end) == ([2], END)


@pytest.mark.parametrize(
    ("found", "kind"), [(page(known=False), UnknownRequest), (page(chunk(5)), StreamError)]
)
def test_a_log_that_is_gone_ends_the_feed(found: Page, kind: type[Exception]) -> None:
    reader = Reader()
    reader.feed.start(reader, is_new=False)
    reader.read(found)
    assert isinstance(reader.error, kind)
    assert reader.closed == 1
    reader.push(chunk(0))
    reader.feed.resume()
    assert (reader.tokens, reader.asked) == ([], 1)


def test_a_reader_that_fails_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    reader.feed.start(reader, is_new=True)
    reader.on_chunk = lambda chunk: 1 / 0  # type: ignore[assignment, method-assign]
    reader.push(chunk(0), chunk(1))
    assert isinstance(reader.error, ZeroDivisionError)
    assert "the reader of r failed" in caplog.text

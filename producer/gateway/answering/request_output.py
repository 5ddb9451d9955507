"""The output that an answer is made of: a feed, and where it begins."""

from __future__ import annotations

from dataclasses import dataclass

from ...reading.feed import Feed, FeedReader
from ...reading.feeds import Feeds

__all__ = ["Output"]


@dataclass(slots=True)
class Output:
    """The output of one request; for the fields that are not explained see :meth:`Feeds.start`.

    Attributes:
        feeds: of the request's shard.
        feed: the request's.
        index: the first token wanted.
        is_new: the request was accepted after the feed was opened.
        attended: it ends when its last reader leaves.
        time_left_ms: until it expires.
    """

    feeds: Feeds
    feed: Feed
    index: int = 0
    is_new: bool = False
    attended: bool = False
    time_left_ms: int | None = None

    @classmethod
    def of(cls, feeds: Feeds, request_id: str, index: int = 0) -> Output:
        """The output of a request that exists."""
        return cls(feeds, feeds.open(request_id), index)

    def start(self, reader: FeedReader) -> None:
        """Hand it to this reader."""
        self.feeds.start(
            self.feed,
            reader,
            index=self.index,
            is_new=self.is_new,
            attended=self.attended,
            time_left_ms=self.time_left_ms,
        )

"""The output that an answer is made of: a feed, and where it begins."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from penstock.shared.errors import PenstockError

from ...reading.feed import Feed, FeedReader
from ...reading.feeds import Feeds

__all__ = ["RETURN_S", "Output"]

_log = logging.getLogger("penstock.gateway")

RETURN_S = 10
"""How long a request needs no reader when the gateway ends under its client, which comes back."""

_HOLD_TIMEOUT_S = 1.5
"""How long Redis may take to hear of that: the last words of a drain do not wait for an outage."""


@dataclass(slots=True)
class Output:
    """The output of one request; for the fields that are not explained see :meth:`Feeds.start`.

    Attributes:
        feeds: of the request's shard.
        feed: the request's.
        index: the first token wanted.
        is_new: the request was accepted after the feed was opened.
        repeats: the same call gets this output again, however it ended.
        time_left_ms: until it expires.
    """

    feeds: Feeds
    feed: Feed
    index: int = 0
    is_new: bool = False
    repeats: bool = False
    time_left_ms: int | None = None

    @classmethod
    def of(cls, feeds: Feeds, request_id: str, index: int = 0) -> Output:
        """The output of a request that exists."""
        return cls(feeds, feeds.open(request_id), index, repeats=True)

    def start(self, reader: FeedReader) -> None:
        """Hand it to this reader."""
        self.feeds.start(
            self.feed,
            reader,
            index=self.index,
            is_new=self.is_new,
            time_left_ms=self.time_left_ms,
        )

    @property
    def needs_reader(self) -> bool:
        """Whether the request ends when its last reader leaves, as far as is known here."""
        return self.feed.registration is not None

    async def hold(self) -> None:
        """Let the request go on without a reader for :data:`RETURN_S`, if it needs one."""
        if not self.needs_reader:
            return
        try:
            async with asyncio.timeout(_HOLD_TIMEOUT_S):
                await self.feeds.hold(self.feed, RETURN_S * 1000)
        except (TimeoutError, PenstockError) as error:
            _log.warning("the request %s may end before it is resumed: %s", self.feed.id, error)

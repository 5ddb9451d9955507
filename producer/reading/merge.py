"""Merges events of one request by token index, so that each token is yielded exactly once.

Events reach a reader from two independent sources, the channel and the log, and both may repeat
what was read already. The index alone decides what is new. This module does no input or output.
"""

from __future__ import annotations

from collections import deque

from penstock.shared.errors import InvalidRequest, StreamDiverged, StreamError, UnknownRequest
from penstock.shared.protocol.events import Chunk, End

from .log_reader import Page

__all__ = ["Merger"]


class Merger:
    """The reading position in one request's output.

    Args:
        request_id: for error messages.
        index: the first token wanted; those before it were read earlier.
        digest: rolling digest of the tokens before ``index``; None: taken from the first event
            that has it.

    Attributes:
        index: one past the last token delivered.
        digest: rolling digest of the tokens before ``index``; None if not known.
        end: the terminal event, once every token before it was delivered.
        ready: chunks to yield, in order, without gap or overlap.
    """

    __slots__ = (
        "_began_at", "_proved", "_request_id", "digest", "end", "index", "ready",
    )  # fmt: skip

    def __init__(self, request_id: str, index: int = 0, digest: int | None = None) -> None:
        self.index = index
        self.digest = 0 if index == 0 else digest
        self.end: End | None = None
        self.ready: deque[Chunk] = deque()
        self._request_id = request_id
        self._began_at = index
        self._proved = digest is not None

    def add(self, event: Chunk | End) -> bool:
        """Merge an event.

        Returns:
            True if it continued, ended or repeated what is known. False if something is missing
            before it; the event is then ignored.

        Raises:
            StreamDiverged: it contradicts tokens that were delivered.
            StreamError: it begins with delivered tokens, and its text cannot be cut by token.
            InvalidRequest: the request ended before the first token wanted.
        """
        if isinstance(event, End):
            return self._add_end(event)
        index, stop = self.index, event.stop
        known = index - event.start
        if known < 0:
            return False
        if stop >= index:
            self._verify(event, known)
        if stop > index:
            self.ready.append(self._cut(event, known) if known else event)
            self.index = stop
        return True

    def add_page(self, page: Page) -> bool:
        """Merge a page of the log; returns whether the log goes on after it.

        Raises:
            UnknownRequest: no such request.
            StreamDiverged, StreamError, InvalidRequest: see :meth:`add`; also for tokens that the
                log has no longer.
        """
        before = self.index
        for event in page.events:
            if not self.add(event):
                raise self._lost(event.start if isinstance(event, Chunk) else event.n)
        if self.end is not None or page.more:
            return self.end is None
        if page.end is not None:
            if not self.add(page.end):
                raise self._lost(page.end.n)
        elif not page.known and self.index == before:
            raise UnknownRequest(self._request_id)
        return False

    def _lost(self, stop: int) -> StreamError:
        return StreamError(
            f"tokens {self.index} to {stop - 1} of request {self._request_id!r} are no longer in "
            "its log; it was deleted, or its retention has passed"
        )

    def _add_end(self, end: End) -> bool:
        if end.n > self.index:
            return False
        if end.n < self.index:
            if self.index == self._began_at and not self._proved:
                allowed = f"0 to {end.n}: request {self._request_id!r} ended after {end.n} tokens"
                raise InvalidRequest("from_index", self.index, allowed)
            raise StreamDiverged(self._request_id, self.index)
        self.end = end
        return True

    def _verify(self, event: Chunk, known: int) -> None:
        if self.digest is not None and event.digest_after(self.digest, known) != event.digest:
            raise StreamDiverged(self._request_id, self.index)
        self.digest = event.digest

    def _cut(self, event: Chunk, known: int) -> Chunk:
        # A worker may publish tokens again in other chunks, after Redis lost them. The digest has
        # just shown that they are the same, and the text up to a token depends on the tokens alone.
        if event.has_seam(known) or self.index == self._began_at:
            return event.without(known)
        raise StreamError(
            f"stream of {self._request_id!r} was published again from token {event.start} on, "
            f"and its text cannot be joined at token {self.index}; read again from index 0"
        )

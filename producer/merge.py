"""Merges events of one request by token index: each token exactly once, whatever comes twice.

Events reach a reader from two sources that know nothing of each other, the channel and the log,
and both may repeat what was read already. The index alone decides what is new. No input, no
output here: this is the part of a stream that can be tested without one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from penstock.shared.errors import InvalidRequest, StreamDiverged, StreamError
from penstock.shared.protocol import Chunk, End, rolling_digest

__all__ = ["Merger"]

_BOUNDARIES_KEPT = 128


class Merger:
    """The reading position in one request's output.

    Args:
        request_id: for error messages.
        index: the first token wanted; those before it were read earlier.
        digest: rolling digest of the tokens before ``index``; None if the reader does not know
            it, which is then taken from the first event that tells.

    Attributes:
        index: one past the last token delivered, so the first one wanted.
        digest: rolling digest of the tokens before ``index``, None if not known.
        end: the terminal event, once every token before it was delivered.
        ready: chunks to hand out, in order, without gap or overlap.
    """

    def __init__(self, request_id: str, index: int = 0, digest: int | None = None) -> None:
        self.index = index
        self.digest = 0 if index == 0 else digest
        self.end: End | None = None
        self.ready: deque[Chunk] = deque()
        self._request_id = request_id
        self._began_at = index
        self._proved = digest is not None
        # Text delivered so far in characters, and how much that was at recent chunk boundaries:
        # after a failover a worker may publish the same tokens again, cut differently.
        self._text_length = 0
        self._boundaries: deque[tuple[int, int]] = deque([(index, 0)], maxlen=_BOUNDARIES_KEPT)

    def add(self, event: Chunk | End) -> bool:
        """Take an event in.

        Returns:
            Whether it continued, ended or repeated what is known. False: something is missing
            before it, and the event was left out.

        Raises:
            StreamDiverged: it contradicts tokens that were delivered.
            StreamError: its text overlaps delivered text at a place that cannot be found.
            InvalidRequest: the request ended before the index that reading was to begin at.
        """
        if isinstance(event, End):
            return self._add_end(event)
        if event.start > self.index:
            return False
        known = self.index - event.start
        fresh = event.token_ids[known:]
        if event.stop >= self.index:
            self._verify(fresh, event.digest)
        elif (length := self._length_at(event.start)) is not None:
            self._boundaries.append((event.stop, length + len(event.text)))
        if fresh:
            chunk = event
            if known:
                text = self._cut(event)
                logprobs = event.logprobs[known:]
                chunk = replace(
                    event, start=self.index, token_ids=fresh, text=text, logprobs=logprobs,
                    text_lengths=event.text_lengths[known:],
                )  # fmt: skip
            self.ready.append(chunk)
            self.index = event.stop
            self._text_length += len(chunk.text)
            self._boundaries.append((self.index, self._text_length))
        return True

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

    def _verify(self, fresh: tuple[int, ...], digest: int) -> None:
        if self.digest is not None and rolling_digest(fresh, self.digest) != digest:
            raise StreamDiverged(self._request_id, self.index)
        self.digest = digest

    def _cut(self, event: Chunk) -> str:
        if event.text_lengths:
            # One chunk in place of those that were published: cut where they were.
            known = sum(event.text_lengths[: self.index - event.start])
            return event.text.encode()[known:].decode()
        if self.index == self._began_at:
            return event.text  # reading begins within this chunk: its text comes whole
        # The text up to an index depends on the tokens before it alone, and the digest has just
        # shown that they are the same: so is the length of their text.
        length = self._length_at(event.start)
        if length is not None:
            return event.text[self._text_length - length :]
        raise StreamError(
            f"stream of {self._request_id!r} was published again from token {event.start} on, "
            f"and its text cannot be joined at token {self.index}; read again from index 0"
        )

    def _length_at(self, index: int) -> int | None:
        """Length of the delivered text up to a chunk boundary, if that is remembered."""
        return next((length for at, length in reversed(self._boundaries) if at == index), None)

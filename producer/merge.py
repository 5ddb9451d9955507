"""Merges events of one request by token index: each token exactly once, whatever comes twice.

Events reach a reader from two sources that know nothing of each other, the channel and the log,
and both may repeat what was read already. The index alone decides what is new. No input, no
output here: this is the part of a stream that can be tested without one.
"""

from __future__ import annotations

from collections import deque

from penstock.shared.errors import InvalidRequest, StreamDiverged, StreamError
from penstock.shared.protocol import Chunk, End

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
        # Text delivered so far in characters by choice, and how much that was at recent chunk
        # boundaries: after a failover a worker may publish the same tokens again, cut differently.
        self._lengths: dict[int, int] = {}
        self._boundaries: deque[tuple[int, dict[int, int]]] = deque(
            [(index, {})], maxlen=_BOUNDARIES_KEPT
        )

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
        if event.stop >= self.index:
            self._verify(event, known)
        elif (lengths := self._lengths_at(event.start)) is not None:
            self._boundaries.append((event.stop, _longer(lengths, event)))
        if event.stop > self.index:
            chunk = self._cut(event, known) if known else event
            self.ready.append(chunk)
            self.index = event.stop
            self._lengths = _longer(self._lengths, chunk)
            self._boundaries.append((self.index, self._lengths))
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

    def _verify(self, event: Chunk, known: int) -> None:
        if self.digest is not None and event.digest_after(self.digest, known) != event.digest:
            raise StreamDiverged(self._request_id, self.index)
        self.digest = event.digest

    def _cut(self, event: Chunk, known: int) -> Chunk:
        if self.index == self._began_at or event.text_lengths:
            # Reading begins within this chunk; or it is one in place of those that were published,
            # and cut where they were.
            return event.without(known, None)
        # The text up to an index depends on the tokens before it alone, and the digest has just
        # shown that they are the same, of the same choices: so is the length of their text.
        before = self._lengths_at(event.start)
        if before is not None:
            delivered = {c: n - before.get(c, 0) for c, n in self._lengths.items()}
            return event.without(known, delivered)
        raise StreamError(
            f"stream of {self._request_id!r} was published again from token {event.start} on, "
            f"and its text cannot be joined at token {self.index}; read again from index 0"
        )

    def _lengths_at(self, index: int) -> dict[int, int] | None:
        """Lengths of the delivered texts up to a chunk boundary, if that is remembered."""
        return next((lengths for at, lengths in reversed(self._boundaries) if at == index), None)


def _longer(lengths: dict[int, int], chunk: Chunk) -> dict[int, int]:
    """Lengths of the texts by choice, after a chunk."""
    if not chunk.parts:
        return {0: lengths.get(0, 0) + len(chunk.text)}
    lengths = dict(lengths)
    for part in chunk.parts:
        lengths[part.choice] = lengths.get(part.choice, 0) + len(part.text)
    return lengths

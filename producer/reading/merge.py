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


_Boundary = tuple[int, int, dict[int, int]]
"""An index, and how many characters come before it: of the one text, or of each choice's."""


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

    __slots__ = (
        "_began_at", "_boundaries", "_here", "_proved", "_request_id",
        "digest", "end", "index", "ready",
    )  # fmt: skip

    def __init__(self, request_id: str, index: int = 0, digest: int | None = None) -> None:
        self.index = index
        self.digest = 0 if index == 0 else digest
        self.end: End | None = None
        self.ready: deque[Chunk] = deque()
        self._request_id = request_id
        self._began_at = index
        self._proved = digest is not None
        # Where recent chunks ended: after a failover a worker may publish the same tokens again,
        # cut differently.
        self._here: _Boundary = (index, 0, {})
        self._boundaries = deque([self._here], maxlen=_BOUNDARIES_KEPT)

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
        index, stop = self.index, event.stop
        known = index - event.start
        if known < 0:
            return False
        if stop >= index:
            self._verify(event, known)
        elif (before := self._boundary(event.start)) is not None:
            self._boundaries.append(_after(before, event))
        if stop > index:
            chunk = self._cut(event, known) if known else event
            self.ready.append(chunk)
            self.index = stop
            self._here = _after(self._here, chunk)
            self._boundaries.append(self._here)
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
        if self.index == self._began_at or event.has_seam(known):
            # Reading begins within this chunk; or it can be cut here, as one in place of those
            # that were published can.
            return event.without(known, None)
        # The text up to an index depends on the tokens before it alone, and the digest has just
        # shown that they are the same, of the same choices: so is the length of their text.
        before = self._boundary(event.start)
        if before is not None:
            return event.without(known, _between(before, self._here))
        raise StreamError(
            f"stream of {self._request_id!r} was published again from token {event.start} on, "
            f"and its text cannot be joined at token {self.index}; read again from index 0"
        )

    def _boundary(self, index: int) -> _Boundary | None:
        """The chunk boundary at an index, if there was one and it is remembered."""
        return next((known for known in reversed(self._boundaries) if known[0] == index), None)


def _after(before: _Boundary, chunk: Chunk) -> _Boundary:
    _, characters, by_choice = before
    if not chunk.parts:
        return chunk.stop, characters + len(chunk.text), by_choice
    lengths = dict(by_choice)
    for part in chunk.parts:
        lengths[part.choice] = lengths.get(part.choice, 0) + len(part.text)
    return chunk.stop, characters, lengths


def _between(before: _Boundary, after: _Boundary) -> dict[int, int]:
    """How many characters of each choice's text come between two boundaries."""
    if not after[2]:
        return {0: after[1] - before[1]}
    return {choice: n - before[2].get(choice, 0) for choice, n in after[2].items()}

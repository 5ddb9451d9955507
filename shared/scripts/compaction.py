"""Puts the log of an ended request into one chunk: same tokens and text, a third of the memory.

A log grows by one entry per step. Most entries hold one token, and their frame (names, counts, a
digest) is several times as long. Once the request has ended, columns are smaller: all ids, the
whole text, one digest, and each token's length of text. Parts of several choices stay as they were
published, because they say where the texts may be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

__all__ = ["compacted"]

_KNOWN = {b"\x94", b"\x95", b"\x96", b"\x97", b"\x98", b"\x99"}
"""How chunks of this version begin, as arrays of four elements or more. Five have logprobs, six
text lengths, seven parts, eight logprobs of the prompt, nine deltas."""


def compacted(chunks: Sequence[bytes]) -> bytes | None:
    """Return one packed chunk in place of all chunks of a log, in order.

    A reader that resumes at any index gets the same tokens and text from it as from the log. Where
    a former chunk of several tokens could not be cut by token, its text comes with its last one.

    Returns:
        None if the log must stay as it is. It has fewer than two chunks, a gap, or a chunk in JSON
        or from a later version.
    """
    if len(chunks) < 2 or not {packed[:1] for packed in chunks} <= _KNOWN:
        return None
    unpacker = msgpack.Unpacker(
        max_buffer_size=0
    )  # in one go: a call for each takes thrice as long
    unpacker.feed(b"".join(chunks))
    ids: list[int] = []
    texts: list[str] = []
    lengths: list[int] = []
    logprobs: list[Any] = []
    parts: list[Any] = []
    of_prompt: Any = None
    deltas: list[Any] = []
    by_token = False  # whether parts, too, need their lengths
    digest = 0
    try:
        for start, some, text, after, *more in unpacker:
            digest, before = after, len(ids)
            if start != len(ids) or not isinstance(some, list):
                return None
            ids += some
            texts.append(text)
            given = more[1] if len(more) > 1 else None
            if len(more) > 2 and more[2]:
                parts += more[2]
                by_token |= bool(given)
                lengths += given or [n for row in more[2] for n in _lengths(row[2], row[3])]
            else:
                lengths += given or _lengths(len(some), text)
            if more:
                logprobs += more[0] or ()
            if len(more) > 3:
                if start and more[3]:  # logprobs of the prompt come first or not at all
                    return None
                of_prompt = of_prompt or more[3]
            if len(more) > 4:
                deltas += [(token + before, *rest) for token, *rest in more[4] or ()]
        fits = len(texts) == len(chunks) and len(lengths) == len(ids)
        if not fits or len(logprobs) not in (0, len(ids)):
            return None
        if parts and (any(texts) or sum(row[2] for row in parts) != len(ids)):
            return None
        if parts and not by_token:
            lengths = []
        whole = _whole(ids, "".join(texts), digest, logprobs, lengths, parts, of_prompt, deltas)
        # By hand and not by Chunk.pack, which would make, and check, objects by the thousand.
        packed: bytes = msgpack.packb(whole, use_single_float=True)
    except (msgpack.UnpackException, TypeError, ValueError, AttributeError, LookupError):
        return None
    return packed


def _whole(
    ids: Sequence[int],
    text: str,
    digest: int,
    logprobs: Sequence[Any],
    lengths: Sequence[int],
    parts: Sequence[Any],
    of_prompt: Any,
    deltas: Sequence[Any],
) -> tuple[Any, ...]:
    """What stands in the one chunk: as many elements as it takes."""
    wire = (0, ids, text, digest, logprobs or None, lengths or None)
    if deltas:
        return (*wire, parts or None, of_prompt or None, deltas)
    if of_prompt:
        return (*wire, parts or None, of_prompt)
    return (*wire, parts) if parts else wire


def _lengths(num_tokens: int, text: str) -> list[int]:
    """Bytes of text by token, where only the whole is known: all of it came with the last."""
    return [0] * (num_tokens - 1) + [len(text) if text.isascii() else len(text.encode())]

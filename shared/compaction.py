"""The log of an ended request as one chunk: same tokens, digest and text, in a third of the memory.

A log grows by an entry per step, mostly of one token, whose frame (names, counts, a digest each)
takes several times what is in it. When nothing is added any more, columns do better: all ids, the
whole text, one digest, and how much of the text came with each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

__all__ = ["compacted"]

_PLAIN = {b"\x94", b"\x95"}
"""How chunks of this version begin: as arrays of four elements, or of five with logprobs."""


def compacted(chunks: Sequence[bytes]) -> bytes | None:
    """One packed chunk in place of all of a log, in order.

    A reader who resumes at any index gets the same tokens and text from it as from the log: texts
    are cut where chunks ended, so an index within a former chunk brings that chunk's text whole.

    Returns:
        None if this log had better stay as it is: it has less than two chunks, or one that is not
        msgpack as this version writes it (JSON, or a form of a later version), or a gap.
    """
    if len(chunks) < 2 or not {packed[:1] for packed in chunks} <= _PLAIN:
        return None
    unpacker = msgpack.Unpacker(
        max_buffer_size=0
    )  # in one go: a call for each takes thrice as long
    unpacker.feed(b"".join(chunks))
    ids: list[int] = []
    texts: list[str] = []
    lengths: list[int] = []
    logprobs: list[Any] = []
    digest = 0
    try:
        for start, some, text, after, *more in unpacker:
            digest = after
            if start != len(ids) or not isinstance(some, list):
                return None
            ids += some
            texts.append(text)
            if len(some) > 1:
                lengths += [0] * (len(some) - 1)
            lengths.append(len(text) if text.isascii() else len(text.encode()))
            if more:
                logprobs += more[0]
        whole = (0, ids, "".join(texts), digest, logprobs or None, lengths)
        # By hand and not by Chunk.pack, which would make, and check, objects by the thousand.
        packed: bytes = msgpack.packb(whole, use_single_float=True)
    except (msgpack.UnpackException, TypeError, ValueError, AttributeError):
        return None
    fits = len(texts) == len(chunks) and len(lengths) == len(ids)
    return packed if fits and len(logprobs) in (0, len(ids)) else None

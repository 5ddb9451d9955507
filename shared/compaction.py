"""The log of an ended request as one chunk: same tokens, digest and text, in a third of the memory.

A log grows by an entry per step, mostly of one token, whose frame (names, counts, a digest each)
takes several times what is in it. When nothing is added any more, columns do better: all ids, the
whole text, one digest, and how much of the text came with each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from .errors import ProtocolError
from .events import unpack_msgpack

__all__ = ["compacted"]


def compacted(chunks: Sequence[bytes]) -> bytes | None:
    """One packed chunk in place of all of a log, in order.

    A reader who resumes at any index gets the same tokens and text from it as from the log: texts
    are cut where chunks ended, so an index within a former chunk brings that chunk's text whole.

    Returns:
        None if this log had better stay as it is: it has less than two chunks, or one that is not
        msgpack as this version writes it (JSON, or a form of a later version), or a gap.
    """
    if len(chunks) < 2:
        return None
    ids: list[int] = []
    texts: list[str] = []
    lengths: list[int] = []
    logprobs: list[Any] = []
    digest = 0
    for packed in chunks:
        if packed[:1] not in (b"\x94", b"\x95"):  # arrays of four and of five
            return None
        try:
            start, some, text, digest, *more = unpack_msgpack("chunk", packed)
        except ProtocolError:
            return None
        if start != len(ids) or not isinstance(some, list) or not isinstance(text, str):
            return None
        ids += some
        texts.append(text)
        size = len(text) if text.isascii() else len(text.encode())
        lengths += [0] * (len(some) - 1)
        lengths.append(size)
        if more and not isinstance(more[0], list):
            return None
        logprobs += more[0] if more else ()
    if len(logprobs) not in (0, len(ids)) or len(lengths) != len(ids):
        return None
    # By hand and not by Chunk.pack: it would make, and check, objects of hundreds of thousands.
    wire = (0, ids, "".join(texts), digest, logprobs or None, lengths)
    whole: bytes = msgpack.packb(wire, use_single_float=True)
    return whole

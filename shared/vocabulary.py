"""The tokens of a model as a shard's workers publish them, for readers without a tokenizer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgpack

from .errors import ProtocolError

__all__ = ["pack_vocabulary", "unpack_vocabulary"]

_MAX_BYTES = 1 << 28


def pack_vocabulary(tokens: Sequence[bytes | None]) -> bytes:
    """Msgpack ``[bytes or nil, ...]`` by token id, compressed by zlib; empty for no tokens."""
    return zlib.compress(msgpack.packb(tokens), 1) if tokens else b""


def unpack_vocabulary(packed: bytes) -> tuple[bytes | None, ...]:
    """The inverse.

    Raises:
        ProtocolError: the bytes are no vocabulary, or one of more than 256 MiB.
    """
    if not packed:
        return ()
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(packed, _MAX_BYTES)
        if reader.unconsumed_tail:
            raise ValueError("larger than 256 MiB")
        tokens = tuple(msgpack.unpackb(data))
    except (zlib.error, msgpack.UnpackException, ValueError, TypeError) as error:
        raise ProtocolError("vocabulary", packed, f"msgpack behind zlib: {error}") from None
    if not all(token is None or isinstance(token, bytes) for token in tokens):
        raise ProtocolError("vocabulary", packed, "byte strings")
    return tokens

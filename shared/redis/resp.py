"""Commands in the encoding in which they travel to Redis (RESP), for senders of many key names.

Client libraries encode each argument of each command anew. An append names two keys for each of
up to 256 requests, and the same ones in every step. Encoding them would cost more than everything
else that a worker does for a token. So a worker encodes each pair once, and its connection takes
bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Argument", "Exchanger", "KeyPair", "encode", "field_pairs"]

Argument = str | bytes | int


def encode(words: Iterable[Argument]) -> bytes:
    """Encode words as consecutive bulk strings, without the array header of a command."""
    parts = []
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def field_pairs(reply: Mapping[bytes, bytes] | Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Names and values of a hash or an entry.

    Args:
        reply: flat, as the server sends it, or the mapping that redis-py makes of it.
    """
    if isinstance(reply, Mapping):
        return reply.items()
    return zip(reply[0::2], reply[1::2], strict=True)


class KeyPair(NamedTuple):
    """The key names of a request's record and log, and both encoded."""

    record: str
    log: str
    wire: bytes

    @classmethod
    def of(cls, record_prefix: str, log_prefix: str, request_id: str) -> KeyPair:
        """The pair of a request: each name is its prefix followed by the id."""
        record, log = record_prefix + request_id, log_prefix + request_id
        return cls(record, log, encode((record, log)))


class Exchanger(ABC):
    """A connection that takes encoded commands."""

    @abstractmethod
    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands together and return their replies; an error reply is returned, not raised.

        Args:
            commands: encoded.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError: what the
                commands did is unknown.
        """

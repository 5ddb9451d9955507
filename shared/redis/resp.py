"""Commands in the form in which they travel to Redis (RESP), for who sends thousands of names.

Client libraries encode each argument of each command anew. An append names two keys of each of up
to 256 requests, the same ones step after step, and to encode them would take longer than all else
that a worker does for a token. So a worker keeps them encoded, and its connection takes bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Argument", "KeyPair", "WireLink", "encode"]

Argument = str | bytes | int


def encode(words: Iterable[Argument]) -> bytes:
    """Words as bulk strings, one behind the other; a command's has their number before them."""
    parts = []
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class KeyPair(NamedTuple):
    """The names of a request's record and of its log, and both encoded."""

    record: str
    log: str
    wire: bytes

    @classmethod
    def of(cls, record_prefix: str, log_prefix: str, request_id: str) -> KeyPair:
        """Those of a request, from what stands before its id in each."""
        record, log = record_prefix + request_id, log_prefix + request_id
        return cls(record, log, encode((record, log)))


class WireLink(ABC):
    """A connection that takes encoded commands."""

    @abstractmethod
    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands together and return their replies; an error reply is returned, not raised.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError: what the
                commands did is unknown.
        """

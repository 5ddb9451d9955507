"""HTTP clients that cost next to nothing: they count tokens and parse nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import cast

__all__ = ["StreamClient", "open_streams"]

_TOKEN = b'"text":"'
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_AT_ONCE = 64


class StreamClient(asyncio.Protocol):
    """One streaming request of ``/v1/completions``.

    Attributes:
        tokens: events with text so far.
        started_at: when the request was sent, by ``time.perf_counter``.
        first_at: when the first token came; None before.
        closed: the connection has ended.
        refused: it got another status than 200.
        done: set at the end of an answer, or of the connection.
    """

    def __init__(self, model: str, max_tokens: int) -> None:
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}
        data = json.dumps(body).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(data)
        ) + data
        self._tail = b""
        self._is_new = True
        self._transport: asyncio.Transport | None = None
        self.tokens = 0
        self.started_at = time.perf_counter()
        self.first_at: float | None = None
        self.closed = False
        self.refused = False
        self.done = asyncio.Event()

    def ask_again(self) -> None:
        """Send the same request on the same connection; the last answer must have ended."""
        assert self._transport is not None
        self._tail, self._is_new = b"", True
        self.tokens, self.first_at = 0, None
        self.done.clear()
        self.started_at = time.perf_counter()
        self._transport.write(self._request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        if self._is_new and not data.startswith(b"HTTP/1.1 200"):
            self.refused = True
        self._is_new = False
        data = self._tail + data
        found = data.count(_TOKEN)
        self._tail = data[1 - len(_TOKEN) :]
        if found and self.first_at is None:
            self.first_at = time.perf_counter()
        self.tokens += found
        if data.endswith(_LAST_CHUNK):
            self.done.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note it."""
        del exc
        self.closed = True
        self.done.set()

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()


async def open_streams(port: int, model: str, count: int, max_tokens: int) -> list[StreamClient]:
    """Open streams, a few at a time; the requests are sent, and nothing is waited for."""
    loop = asyncio.get_running_loop()
    clients: list[StreamClient] = []

    async def open_some(numbers: Sequence[int]) -> None:
        for _ in numbers:
            _, client = await loop.create_connection(
                lambda: StreamClient(model, max_tokens), "127.0.0.1", port
            )
            clients.append(client)

    await asyncio.gather(
        *(open_some(range(start, count, _AT_ONCE)) for start in range(min(_AT_ONCE, count)))
    )
    return clients

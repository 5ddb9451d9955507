"""Plays the worker's side of one request: its record, its log and its channel, written directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import redis.asyncio

from penstock.shared.keys import Keys
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.states import Reason, State


class LogWriter:
    """One running request. Token i has id ``7 * i + salt`` and adds the text ``<i>``."""

    def __init__(
        self, client: redis.asyncio.Redis, request_id: str, *, salt: int = 0, model: str = "demo"
    ) -> None:
        self.client = client
        self.id = request_id
        self.keys = Keys(model)
        self.salt = salt
        self.n = 0

    def token(self, index: int) -> int:
        return 7 * index + self.salt

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(self.token(i) for i in range(start, stop))

    @staticmethod
    def text(start: int, stop: int) -> str:
        return "".join(f"<{i}>" for i in range(start, stop))

    def chunk(self, start: int, stop: int) -> Chunk:
        digest = rolling_digest(self.tokens(0, stop))
        lengths = tuple(len(self.text(i, i + 1)) for i in range(start, stop))
        return Chunk(
            start, self.tokens(start, stop), self.text(start, stop), digest,
            text_lengths=lengths if stop - start > 1 else (),
        )  # fmt: skip

    def end(self, reason: Reason = Reason.STOP) -> End:
        return End(n=self.n, reason=reason)

    async def open(self) -> LogWriter:
        record = {
            "state": State.RUNNING.value,
            "tokens": self.n,
            "lane": "normal",
            "tenant": "default",
        }
        await self.client.hset(self.keys.request(self.id), mapping=record)
        return self

    async def append(self, count: int, *, publish: bool = True) -> Chunk:
        """Write the next ``count`` tokens as one chunk."""
        chunk = self.chunk(self.n, self.n + count)
        self.n = chunk.stop
        pipeline = self.client.pipeline(transaction=True)
        pipeline.hset(self.keys.request(self.id), "tokens", self.n)
        pipeline.xadd(self.keys.log(self.id), {"chunk": chunk.pack()}, id=f"{self.n}-0")
        if publish:
            pipeline.publish(self.keys.channel(self.id), chunk.pack())
        await pipeline.execute()
        return chunk

    async def publish(self, event: Chunk | End | bytes) -> int:
        """Publish only; returns how many received it."""
        packed = event if isinstance(event, bytes) else event.pack()
        return int(await self.client.publish(self.keys.channel(self.id), packed))

    async def finish(self, reason: Reason = Reason.STOP, *, publish: bool = True) -> End:
        end = self.end(reason)
        packed = end.pack()
        record = {"state": end.state.value, "reason": reason.value, "tokens": self.n, "end": packed}
        pipeline = self.client.pipeline(transaction=True)
        pipeline.xadd(self.keys.log(self.id), {"end": packed}, id=f"{self.n}-1")
        pipeline.hset(self.keys.request(self.id), mapping=record)
        if publish:
            pipeline.publish(self.keys.channel(self.id), packed)
        await pipeline.execute()
        return end

    async def replace_log(self, chunks: list[Chunk], *, with_end: bool = True) -> None:
        """Put other chunks in place of the log, as compaction or a failover may."""
        pipeline = self.client.pipeline(transaction=True)
        pipeline.delete(self.keys.log(self.id))
        for chunk in chunks:
            pipeline.xadd(self.keys.log(self.id), {"chunk": chunk.pack()}, id=f"{chunk.stop}-0")
        if with_end:
            pipeline.xadd(self.keys.log(self.id), {"end": self.end().pack()}, id=f"{self.n}-1")
        await pipeline.execute()


async def eventually(
    condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = 60.0
) -> None:
    """Poll until ``await condition()`` is true; after the timeout fail, saying what was awaited."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)

"""Reading streams that a test writes, and checking that what was read is all of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import redis.asyncio
from log_writer import LogWriter, eventually

from penstock.producer import Producer, TokenStream
from penstock.shared.protocol.events import Chunk
from penstock.shared.scripts.compaction import compacted
from penstock.shared.scripts.log_operations import LogOperations

Client = redis.asyncio.Redis


async def write(writer: LogWriter, count: int, *, seed: int = 0, publish: bool = True) -> None:
    """Append ``count`` tokens in chunks of 1 to 4."""
    rng = random.Random(seed)
    stop = writer.n + count
    while writer.n < stop:
        await writer.append(min(rng.randint(1, 4), stop - writer.n), publish=publish)


async def read(stream: TokenStream, count: int) -> list[Chunk]:
    """Read chunks until ``count`` more tokens came."""
    chunks: list[Chunk] = []
    while sum(len(chunk.token_ids) for chunk in chunks) < count:
        chunks.append(await anext(stream))
    return chunks


def check_output(chunks: list[Chunk], writer: LogWriter, start: int, stop: int) -> None:
    """The chunks are exactly the tokens and the text of ``[start, stop)``."""
    assert [t for c in chunks for t in c.token_ids] == list(writer.tokens(start, stop))
    assert "".join(c.text for c in chunks) == writer.text(start, stop)
    assert [c.start for c in chunks[1:]] == [c.stop for c in chunks[:-1]]


async def subscribers(client: Client, writer: LogWriter) -> int:
    ((_, count),) = await client.pubsub_numsub(writer.keys.channel(writer.id))
    return int(count)


async def until_subscribed(client: Client, writer: LogWriter, count: int = 1) -> None:
    async def reached() -> bool:
        return await subscribers(client, writer) == count

    await eventually(reached, f"{count} subscribers")


@contextlib.asynccontextmanager
async def live_stream(
    producer: Producer, client: Client, writer: LogWriter
) -> AsyncIterator[TokenStream]:
    """A stream that has read one token and waits on its subscription."""
    await writer.append(1)
    async with producer.stream(writer.id) as stream:
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await until_subscribed(client, writer)
        await writer.append(1)
        await waiting
        yield stream


async def compact(writer: LogWriter) -> None:
    """Make its log compact, as a worker does some time after the end."""
    await writer.client.expire(writer.keys.log(writer.id), 600)
    logs = LogOperations(writer.client, writer.keys)
    (log,) = await logs.read([writer.id])
    assert await logs.compact([(log, compacted(log.chunks))]) == 1
    assert await writer.client.xlen(writer.keys.log(writer.id)) == 1

"""What readers make of logs that are compact, finished, damaged, contradictory or out of reach."""

from __future__ import annotations

import asyncio

import pytest
from integration.reading import (
    Client,
    check_output,
    compact,
    live_stream,
    read,
    until_subscribed,
    write,
)
from log_writer import LogWriter

from penstock.producer import Producer
from penstock.shared.errors import (
    InvalidRequest,
    RedisUnavailable,
    StreamDiverged,
    StreamError,
    UnknownRequest,
)
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import rolling_digest


async def test_a_log_made_compact_under_its_readers(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    """Each has read to another place: within a page, at its end, within a chunk, at the end."""
    await write(writer, 1500)
    await writer.finish()
    streams, begun = [], []
    for count in (0, 1, 2, 3, 255, 256, 257, 300, 640, 700, 1200, 1499, 1500):
        streams.append(producer.stream(writer.id))
        begun.append(await read(streams[-1], count))
    within = [producer.stream(writer.id, from_index=index) for index in (1, 2, 3, 641)]
    texts = [
        (await producer.stream(writer.id, from_index=i).collect()).text for i in (1, 2, 3, 641)
    ]
    await compact(writer)
    for stream, chunks in zip(streams, begun, strict=True):
        chunks += [chunk async for chunk in stream]
        check_output(chunks, writer, 0, 1500)
        assert stream.end == writer.end()
    for stream, text in zip(within, texts, strict=True):
        result = await stream.collect()
        assert result.token_ids == writer.tokens(result.end.n - len(result.token_ids), 1500)
        assert result.text == text


async def test_a_compact_log_reads_the_same_from_every_index(
    producer: Producer, writer: LogWriter
) -> None:
    await write(writer, 120)
    end = await writer.finish()
    ids = writer.tokens(0, 120)

    async def read_all() -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for index in range(121):
            digest = rolling_digest(ids[:index])
            stream = producer.stream(writer.id, from_index=index, from_digest=digest)
            result = await stream.collect()
            found.append((result.token_ids, result.text, result.end, stream.digest))
        return found

    before = await read_all()
    await compact(writer)
    assert await read_all() == before
    with pytest.raises(InvalidRequest, match=r"from_index: got 121; allowed: 0 to 120"):
        await producer.stream(writer.id, from_index=121).collect()
    with pytest.raises(StreamDiverged):
        await producer.stream(writer.id, from_index=7, from_digest=1).collect()
    assert (await producer.result(writer.id)).end == end


async def test_an_unknown_request(producer: Producer) -> None:
    with pytest.raises(UnknownRequest, match="'nobody' is not known"):
        await producer.result("nobody")
    with pytest.raises(UnknownRequest):
        await producer.status("nobody")
    with pytest.raises(UnknownRequest):
        await producer.cancel("nobody")


async def test_a_request_that_vanishes_under_its_reader(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        await redis_client.flushdb()
        async with asyncio.timeout(30):
            with pytest.raises(UnknownRequest):
                await anext(stream)


async def test_readers_at_and_beyond_the_end(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await write(writer, 10)
    early = asyncio.create_task(producer.stream(writer.id, from_index=11).collect())
    await until_subscribed(redis_client, writer)
    await writer.finish()
    at = await producer.stream(writer.id, from_index=10).collect()
    assert (at.token_ids, at.text, at.end) == ((), "", writer.end())
    for reading in (early, producer.stream(writer.id, from_index=11).collect()):
        with pytest.raises(InvalidRequest, match=r"from_index: got 11; allowed: 0 to 10"):
            await reading
    with pytest.raises(InvalidRequest, match="from_index"):
        producer.stream(writer.id, from_index=-1)


@pytest.mark.parametrize("published", [True, False])
async def test_an_end_below_what_was_read(
    producer: Producer, redis_client: Client, writer: LogWriter, published: bool
) -> None:
    """A server with `appendfsync everysec` lost the log's tail, and the request ended there."""
    async with live_stream(producer, redis_client, writer) as stream:
        await writer.append(8)
        await read(stream, 8)
        writer.n = 5
        await writer.replace_log([writer.chunk(0, 5)], with_end=False)
        await writer.finish(publish=published)
        async with asyncio.timeout(30):
            with pytest.raises(StreamDiverged) as caught:
                await anext(stream)
    assert caught.value.index == 10
    # The log from the index on is empty: as docs/protocol.md says, its last entry tells.
    log = writer.keys.log(writer.id)
    assert await redis_client.xrange(log, "10-0", "+") == []
    ((entry, fields),) = await redis_client.xrevrange(log, "+", "-", count=1)
    assert (entry, unpack_event(fields[b"end"])) == (b"5-1", writer.end())


async def test_a_log_that_is_gone(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await write(writer, 10)
    end = await writer.finish()
    await redis_client.delete(writer.keys.log(writer.id))
    at_end = producer.stream(writer.id, from_index=10)
    assert [chunk async for chunk in at_end] == []
    assert at_end.end == end  # from the record
    with pytest.raises(StreamError, match=r"tokens 4 to 9 .* no longer in its log"):
        await producer.stream(writer.id, from_index=4).collect()


async def test_a_log_with_a_hole(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await writer.append(5)
    await writer.append(5)
    await redis_client.xdel(writer.keys.log(writer.id), "5-0")
    with pytest.raises(StreamError, match=r"tokens 0 to 4 .* no longer in its log"):
        await producer.stream(writer.id).collect()


async def test_a_key_of_the_wrong_type(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await redis_client.set(writer.keys.log(writer.id), "x")
    with pytest.raises(StreamError, match="overwritten"):
        await producer.stream(writer.id).collect()


async def test_a_compacted_log_serves_readers_in_the_middle(
    producer: Producer, writer: LogWriter
) -> None:
    await write(writer, 600)
    await writer.finish()
    async with producer.stream(writer.id) as stream:
        chunks = await read(stream, 1)
        await writer.replace_log([writer.chunk(0, 600)])
        chunks += [chunk async for chunk in stream]
    check_output(chunks, writer, 0, 600)
    resumed = await producer.stream(writer.id, from_index=250).collect()
    assert resumed.token_ids == writer.tokens(250, 600)


async def test_a_log_that_contradicts_the_reader(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        other = LogWriter(redis_client, writer.id, salt=1)
        other.n = 4
        await writer.replace_log([other.chunk(0, 2), other.chunk(2, 4)], with_end=False)
        await other.publish(other.chunk(2, 4))
        with pytest.raises(StreamDiverged) as caught:
            await anext(stream)
        assert caught.value.index == 2
        assert await anext(stream, None) is None  # the stream is over

    digest = rolling_digest(writer.tokens(0, 2))
    with pytest.raises(StreamDiverged):
        await producer.stream(writer.id, from_index=2, from_digest=digest).collect()
    await other.finish()
    assert (await producer.result(writer.id)).token_ids == other.tokens(0, 4)


async def test_a_tail_lost_in_a_failover_and_published_again(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    """The owner repeats what the new primary lacks, in other chunks: nothing shows outside."""
    async with live_stream(producer, redis_client, writer) as stream:
        chunks = [writer.chunk(0, 2)]
        for _ in range(5):
            await writer.append(2)
        chunks += await read(stream, 10)
        await writer.replace_log([writer.chunk(0, 2), writer.chunk(2, 6)], with_end=False)
        await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        writer.n = 6
        await writer.append(11)
        await writer.finish()
        chunks += [chunk async for chunk in stream]
        check_output(chunks, writer, 0, 17)


async def test_a_timeout_leaves_the_stream_usable(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await writer.append(1)
    async with producer.stream(writer.id, timeout=0.05) as stream:
        check_output(await read(stream, 1), writer, 0, 1)
        with pytest.raises(TimeoutError, match=r"no token of request 'request-1' within 0\.05 s"):
            await anext(stream)
        await writer.append(2)
        check_output(await read(stream, 2), writer, 1, 3)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.05 s"):
        await producer.result(writer.id, timeout=0.05)


async def test_a_server_that_goes_away_for_good(
    start_redis: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(start_redis)
    server: EmbeddedRedis = start_redis()
    client = Client.from_url(server.url)
    async with client, Producer(server.url, outage_s=0.3) as producer:
        writer = await LogWriter(client, "request-1").open()
        async with live_stream(producer, client, writer) as stream:
            server.stop()
            async with asyncio.timeout(30):
                with pytest.raises(RedisUnavailable, match="cannot reach Redis at redis://127"):
                    await anext(stream)
        with pytest.raises(RedisUnavailable):
            await producer.submit("hello")
    warnings = [record for record in caplog.records if "connection lost" in record.message]
    assert len(warnings) == 1, "one of an outage, however often it is tried again"


async def test_a_user_who_may_not_subscribe(
    redis_url: str, redis_client: Client, writer: LogWriter
) -> None:
    await redis_client.execute_command(
        "ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+@all", "-subscribe", "resetchannels"
    )
    try:
        async with Producer(redis_url.replace("redis://", "redis://deaf:secret@")) as producer:
            async with asyncio.timeout(30):
                with pytest.raises(RedisUnavailable, match="refuses to subscribe"):
                    await producer.result(writer.id)
    finally:
        await redis_client.execute_command("ACL", "DELUSER", "deaf")

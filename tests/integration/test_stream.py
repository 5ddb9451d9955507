"""Delivery to readers, on a real server over TCP: every token exactly once, by index."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable

import msgpack
import pytest
import redis.asyncio
from log_writer import LogWriter, eventually

from penstock.producer import Producer, TokenStream
from penstock.producer.subscriber import Subscriber
from penstock.shared.compaction import compacted
from penstock.shared.embedded import EmbeddedRedis
from penstock.shared.errors import (
    InvalidRequest,
    RedisUnavailable,
    StreamDiverged,
    StreamError,
    UnknownRequest,
)
from penstock.shared.log_operations import LogOperations
from penstock.shared.protocol import Chunk, Reason, State, rolling_digest

Client = redis.asyncio.Redis


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Producer]:
    async with Producer(redis_url) as producer:
        yield producer


@pytest.fixture
async def writer(redis_client: Client) -> LogWriter:
    return await LogWriter(redis_client, "request-1").open()


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


async def test_live_and_late_readers_see_the_same(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    live = asyncio.create_task(producer.stream(writer.id).collect())
    await until_subscribed(redis_client, writer)
    await write(writer, 200)
    await writer.finish(Reason.LENGTH)
    late = await producer.result(writer.id)
    assert await live == late
    assert late.token_ids == writer.tokens(0, 200)
    assert late.text == writer.text(0, 200)
    assert late.end.n == 200
    assert late.state is State.COMPLETED


async def test_returning_readers_from_every_index_of_a_finished_request(
    producer: Producer, writer: LogWriter
) -> None:
    await write(writer, 200)
    end = await writer.finish()
    begins = [chunk.start async for chunk in producer.stream(writer.id)]
    for index in range(201):
        stream = producer.stream(writer.id, from_index=index)
        chunks = [chunk async for chunk in stream]
        # An index within a chunk brings that chunk's text whole.
        begin = max((b for b in begins if b <= index), default=0) if index < 200 else 200
        assert "".join(c.text for c in chunks) == writer.text(begin, 200)
        assert [t for c in chunks for t in c.token_ids] == list(writer.tokens(index, 200))
        assert stream.end == end
        assert stream.index == 200
        assert stream.digest == rolling_digest(writer.tokens(0, 200))


async def test_returning_readers_from_every_index_while_tokens_come(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await write(writer, 90)

    async def follow(index: int) -> tuple[int, ...]:
        return (await producer.stream(writer.id, from_index=index).collect()).token_ids

    readers = [asyncio.create_task(follow(index)) for index in range(201)]
    await until_subscribed(redis_client, writer)
    await write(writer, 110, seed=1)
    await writer.finish()
    for index, tokens in enumerate(await asyncio.gather(*readers)):
        assert tokens == writer.tokens(index, 200)


async def test_a_reader_that_leaves_and_returns_joins_without_a_seam(
    producer: Producer, writer: LogWriter
) -> None:
    await write(writer, 40)
    chunks: list[Chunk] = []
    index, digest = 0, None
    while index < 40:
        async with producer.stream(writer.id, from_index=index, from_digest=digest) as stream:
            chunks += await read(stream, 1)
            index, digest = stream.index, stream.digest
        await stream.aclose()
        assert await anext(stream, None) is None
    check_output(chunks, writer, 0, 40)


async def test_lost_doubled_and_reordered_messages(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    rng = random.Random(7)
    async with live_stream(producer, redis_client, writer) as stream:
        for _ in range(20):
            chunks = [await writer.append(rng.randint(1, 3), publish=False) for _ in range(6)]
            storm = rng.choices(chunks, k=5) + chunks[-1:]  # the last, so that a gap shows
            for chunk in storm:
                await writer.publish(chunk)
            check_output(
                await read(stream, chunks[-1].stop - chunks[0].start),
                writer, chunks[0].start, chunks[-1].stop,
            )  # fmt: skip
        await writer.finish()
        assert [chunk async for chunk in stream] == []
        assert stream.end == writer.end()


async def test_a_message_that_never_came_is_found_after_a_second(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        await writer.append(3, publish=False)
        async with asyncio.timeout(2.5):
            check_output(await read(stream, 3), writer, 2, 5)
        await writer.finish(publish=False)
        async with asyncio.timeout(2.5):
            assert await anext(stream, None) is None
        assert stream.end == writer.end()


async def test_who_asks_again_and_again_looks_at_the_log_as_others_do(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await writer.append(1)
    async with producer.stream(writer.id, timeout=0.1) as stream, asyncio.timeout(2.5):
        check_output(await read(stream, 1), writer, 0, 1)
        waiting = asyncio.create_task(anext(stream))
        await until_subscribed(redis_client, writer)
        await writer.finish(publish=False)
        with pytest.raises(TimeoutError):
            await waiting
        while stream.end is None:
            with contextlib.suppress(TimeoutError):
                assert await anext(stream, None) is None


async def test_a_closed_stream_lets_go_of_who_waits_on_it(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        waiting = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        await stream.aclose()
        async with asyncio.timeout(0.5):  # at once, and not when a second of silence is over
            assert await waiting is None


async def test_a_closed_producer_says_so(
    redis_url: str, redis_client: Client, writer: LogWriter
) -> None:
    producer = await Producer(redis_url).connect()
    async with live_stream(producer, redis_client, writer) as stream:
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await producer.aclose()
        async with asyncio.timeout(0.5):
            for reading in (waiting, anext(stream), producer.stream(writer.id).collect()):
                with pytest.raises(RuntimeError, match="this producer is closed"):
                    await reading
    with pytest.raises(RuntimeError, match="this producer is closed"):
        await producer.submit("x")
    await producer.aclose()

    async def gone() -> bool:
        return len(await redis_client.client_list()) == 1

    await eventually(gone, "no connection is left")


async def test_a_server_that_answers_no_ping_is_left_and_found_again(
    start_redis: Callable[..., EmbeddedRedis], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis(password="")
    async with Client.from_url(server.url, socket_connect_timeout=0.2) as client:
        subscriber = Subscriber(client, ping_after_s=0.1)
        subscription = subscriber.open("news")
        now = asyncio.get_running_loop().time

        async def confirmed() -> bool:
            return await subscription.wait(now() + 5) and subscription.take() is None

        assert await confirmed()
        assert not await subscription.wait(now() + 0.5), "behind without a reason"
        assert subscriber.connections == 1, "a server that is only silent was left"
        os.kill(server.pid, signal.SIGSTOP)
        try:

            async def left() -> bool:
                return "no answer to a ping" in caplog.text

            await eventually(left, "the connection is given up")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await confirmed()
        assert subscriber.connections == 2
        await subscriber.aclose()


MALFORMED = [
    b"\xc1 not msgpack",
    b"{not JSON",
    b"",
    *map(
        msgpack.packb,
        [
            [2, ["x"], "t", 1],
            [2, [-1], "t", 1],
            [2, [1 << 40], "t", 1],
            [2, [5.5], "t", 1],
            [2, "ab", "t", 1],
            [2, {"a": 1}, "t", 1],
            [2, [5], 7, 1],
            [2, [5], "t", None],
            ["2", [5], "t", 1],
            [-5, [5] * 7, "t", 1],
            [-1, "2", "completed", "stop", "", None],
            [-1, 2.5, "completed", "stop", "", None],
            [-1, 2, "completed", "stop", 5, None],
            [-1, 2, "completed", "stop", "", {"prompt_tokens": "x"}],
            [],
            {},
            None,
        ],
    ),
]


async def test_what_others_publish_does_no_harm(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        for number, message in enumerate(MALFORMED):
            assert await writer.publish(message) == 1
            await writer.append(1)
            check_output(await read(stream, 1), writer, 2 + number, 3 + number)
        begin = writer.n
        assert await writer.publish(Chunk(begin, (5, 5), "wrong", digest=1)) == 1
        assert await writer.publish(Chunk(90, (5, 5), "far ahead", digest=1)) == 1
        await write(writer, 20)
        await writer.finish()
        check_output([chunk async for chunk in stream], writer, begin, begin + 20)


@pytest.mark.parametrize("kind", ["pubsub", "normal"])
async def test_killed_connections_cost_no_token(
    producer: Producer, redis_client: Client, writer: LogWriter, kind: str
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        chunks: list[Chunk] = []
        for round_ in range(5):
            await redis_client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            await write(writer, 30, seed=round_)
            chunks += await read(stream, 10)
        await writer.finish()
        chunks += [chunk async for chunk in stream]
        check_output(chunks, writer, 2, 152)


async def test_three_hundred_streams_share_one_connection(
    producer: Producer, redis_client: Client
) -> None:
    writers = [await LogWriter(redis_client, f"r{i}", salt=i).open() for i in range(300)]
    readers = [asyncio.create_task(producer.result(writer.id)) for writer in writers]

    async def all_subscribed() -> bool:
        return len(await redis_client.pubsub_channels()) == 300

    await eventually(all_subscribed, "300 channels")
    connections = await redis_client.client_list(_type="pubsub")
    assert [c["sub"] for c in connections] == ["300"]
    assert len(await redis_client.client_list()) <= 1 + 1 + 8  # this one, pub/sub, commands
    for start in range(0, 300, 50):
        # Some are cut off in the middle; all are told everything.
        for first in range(0, 300, 50):
            group = writers[first : first + 50]
            await asyncio.gather(*(write(writer, 10, seed=start) for writer in group))
        if start == 100:
            await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    for writer in writers:
        await writer.finish()
    for writer, result in zip(writers, await asyncio.gather(*readers), strict=True):
        assert result.token_ids == writer.tokens(0, 60)
        assert result.text == writer.text(0, 60)

    async def none_subscribed() -> bool:
        return await redis_client.pubsub_channels() == []

    await eventually(none_subscribed, "no channel")


async def test_a_slow_reader_catches_up_from_the_log(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        await write(writer, 2000)  # far more chunks than a stream buffers, and than a page holds
        await writer.finish()
        async with asyncio.timeout(0.9):  # at once, and not when a second of silence is over
            chunks = await read(stream, 1)
        chunks += [chunk async for chunk in stream]
        check_output(chunks, writer, 2, 2002)


async def compact(writer: LogWriter) -> None:
    """Make its log compact, as a worker does some time after the end."""
    await writer.client.expire(writer.keys.log(writer.id), 600)
    logs = LogOperations(writer.client, writer.keys)
    (log,) = await logs.read([writer.id])
    assert await logs.compact([(log, compacted(log.chunks))]) == 1
    assert await writer.client.xlen(writer.keys.log(writer.id)) == 1


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


async def test_leaving_early_unsubscribes(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer):
        assert await subscribers(redis_client, writer) == 1
    await until_subscribed(redis_client, writer, 0)

    async with (
        live_stream(producer, redis_client, writer),
        live_stream(producer, redis_client, writer),
    ):
        assert await subscribers(redis_client, writer) == 1  # two streams, one channel
    await until_subscribed(redis_client, writer, 0)

    dropped = producer.stream(writer.id, from_index=writer.n)
    waiting = asyncio.create_task(anext(dropped))
    await until_subscribed(redis_client, writer)
    await writer.append(1)
    await waiting
    del dropped, waiting
    await until_subscribed(redis_client, writer, 0)


async def test_reopening_a_channel_at_once_misses_nothing(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async def follow() -> list[Chunk]:
        chunks: list[Chunk] = []
        while (chunks[-1].stop if chunks else 0) < 300:
            index = chunks[-1].stop if chunks else 0
            async with producer.stream(writer.id, from_index=index) as stream:
                chunks += await read(stream, 5)
        return chunks

    reader = asyncio.create_task(follow())
    await write(writer, 300)
    async with asyncio.timeout(10):
        check_output(await reader, writer, 0, 300)


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
        async with asyncio.timeout(2.5):
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


async def test_a_server_that_goes_away_for_good(start_redis: object) -> None:
    assert callable(start_redis)
    server: EmbeddedRedis = start_redis()
    client = Client.from_url(server.url)
    async with client, Producer(server.url, outage_s=0.3) as producer:
        writer = await LogWriter(client, "request-1").open()
        async with live_stream(producer, client, writer) as stream:
            server.stop()
            async with asyncio.timeout(5):
                with pytest.raises(RedisUnavailable, match="cannot reach Redis at redis://127"):
                    await anext(stream)
        with pytest.raises(RedisUnavailable):
            await producer.submit("hello")


async def test_a_user_who_may_not_subscribe(
    redis_url: str, redis_client: Client, writer: LogWriter
) -> None:
    await redis_client.execute_command(
        "ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+@all", "-subscribe", "resetchannels"
    )
    try:
        async with Producer(redis_url.replace("redis://", "redis://deaf:secret@")) as producer:
            async with asyncio.timeout(5):
                with pytest.raises(RedisUnavailable, match="refuses to subscribe"):
                    await producer.result(writer.id)
    finally:
        await redis_client.execute_command("ACL", "DELUSER", "deaf")

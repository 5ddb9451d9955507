"""Delivery to readers, on a real server over TCP: every token exactly once, by index."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable

import msgpack
import pytest
from integration.reading import (
    Client,
    check_output,
    live_stream,
    read,
    subscribers,
    until_subscribed,
    write,
)
from log_writer import LogWriter, eventually

from penstock.producer import Producer
from penstock.producer.reading import subscription
from penstock.producer.reading.subscriber import Subscriber
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.events import Chunk, rolling_digest
from penstock.shared.protocol.states import Reason, State


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
    for index in range(201):
        stream = producer.stream(writer.id, from_index=index)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.text for c in chunks) == writer.text(index, 200)
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
        async with asyncio.timeout(30):
            check_output(await read(stream, 3), writer, 2, 5)
        await writer.finish(publish=False)
        async with asyncio.timeout(30):
            assert await anext(stream, None) is None
        assert stream.end == writer.end()


@pytest.fixture
def patient_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers do not look at the log because of silence: what they see, they see at once."""
    monkeypatch.setattr(subscription, "_SILENCE_S", 600.0)


async def test_who_asks_again_and_again_looks_at_the_log_as_others_do(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    await writer.append(1)
    async with producer.stream(writer.id, timeout=0.1) as stream, asyncio.timeout(30):
        check_output(await read(stream, 1), writer, 0, 1)
        waiting = asyncio.create_task(anext(stream))
        await until_subscribed(redis_client, writer)
        await writer.finish(publish=False)
        with pytest.raises(TimeoutError):
            await waiting
        while stream.end is None:
            with contextlib.suppress(TimeoutError):
                assert await anext(stream, None) is None


@pytest.mark.usefixtures("patient_readers")
async def test_a_closed_stream_lets_go_of_who_waits_on_it(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        waiting = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        await stream.aclose()
        async with asyncio.timeout(30):
            assert await waiting is None


@pytest.mark.usefixtures("patient_readers")
async def test_a_closed_producer_says_so(
    redis_url: str, redis_client: Client, writer: LogWriter
) -> None:
    producer = await Producer(redis_url).connect()
    async with live_stream(producer, redis_client, writer) as stream:
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await producer.aclose()
        async with asyncio.timeout(30):
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


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_streams_share_one_connection(
    producer: Producer, redis_client: Client, count: int
) -> None:
    writers = [await LogWriter(redis_client, f"r{i}", salt=i).open() for i in range(count)]
    readers = [asyncio.create_task(producer.result(writer.id)) for writer in writers]

    async def all_subscribed() -> bool:
        connections = await redis_client.client_list(_type="pubsub")
        return [c["sub"] for c in connections] == [str(count)]

    await eventually(all_subscribed, f"{count} channels on one connection")
    (first_connection,) = await redis_client.client_list(_type="pubsub")
    assert len(await redis_client.client_list()) <= 1 + 1 + 8  # this one, pub/sub, commands
    for start in range(0, 300, 50):
        # Some are cut off in the middle; all are told everything.
        for first in range(0, count, 50):
            group = writers[first : first + 50]
            await asyncio.gather(*(write(writer, 10, seed=start) for writer in group))
        if start == 100:
            await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await eventually(all_subscribed, f"{count} channels on one connection again")
    (last_connection,) = await redis_client.client_list(_type="pubsub")
    assert last_connection["id"] != first_connection["id"]
    for writer in writers:
        await writer.finish()
    for writer, result in zip(writers, await asyncio.gather(*readers), strict=True):
        assert result.token_ids == writer.tokens(0, 60)
        assert result.text == writer.text(0, 60)

    async def none_subscribed() -> bool:
        return await redis_client.pubsub_channels() == []

    await eventually(none_subscribed, "no channel")


@pytest.mark.usefixtures("patient_readers")
async def test_a_slow_reader_catches_up_from_the_log(
    producer: Producer, redis_client: Client, writer: LogWriter
) -> None:
    async with live_stream(producer, redis_client, writer) as stream:
        await write(writer, 2000)  # far more chunks than a stream buffers, and than a page holds
        await writer.finish()
        async with asyncio.timeout(30):
            chunks = await read(stream, 1)
        chunks += [chunk async for chunk in stream]
        check_output(chunks, writer, 2, 2002)


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
    async with asyncio.timeout(30):
        check_output(await reader, writer, 0, 300)

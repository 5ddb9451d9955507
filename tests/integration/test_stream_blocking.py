"""The blocking client: the same calls without an event loop, from any thread of one process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import traceback
from collections.abc import Awaitable, Callable

import pytest
from log_writer import LogWriter
from redis import Redis
from redis.asyncio import Redis as Client
from waiting import wait_until

from penstock.producer import BlockingProducer, Producer, TokenStream
from penstock.shared.errors import RedisUnavailable, UnknownRequest
from penstock.shared.keys import Keys
from penstock.shared.protocol.states import State


def test_the_blocking_client(redis_url: str) -> None:
    async def play(request_id: str) -> None:
        async with Client.from_url(redis_url) as client:
            writer = await LogWriter(client, request_id).open()
            for _ in range(10):
                await writer.append(2)
            await writer.finish()

    with BlockingProducer(redis_url) as producer:
        stream = producer.generate("x", timeout=10)
        worker = threading.Thread(target=lambda: asyncio.run(play(stream.id)))
        worker.start()
        text = "".join(chunk.text for chunk in stream)
        worker.join()
        assert text == LogWriter.text(0, 20)
        assert stream.end is not None
        assert stream.end.n == stream.index == 20
        assert producer.result(stream.id).text == text
        assert producer.stream(stream.id, from_index=18).collect().text == LogWriter.text(18, 20)
        assert producer.status(stream.id).state is State.COMPLETED
        assert producer.cancel(stream.id).changed is False
        with producer.stream(stream.id) as early:
            next(early)
        assert next(early, None) is None
        with pytest.raises(UnknownRequest):
            producer.result("nobody")
        with pytest.raises(TimeoutError):
            producer.result(producer.submit("y").id, timeout=0.05)
    with pytest.raises(RuntimeError, match="closed"):
        producer.submit("x")
    producer.close()


def test_the_blocking_client_leaves_no_thread(redis_url: str) -> None:
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "penstock-producer"]

    forgotten = BlockingProducer(redis_url)
    stream = forgotten.generate("x")
    assert len(threads()) == 1
    del forgotten, stream
    gc.collect()
    wait_until(lambda: not threads(), "the forgotten client's thread has ended")
    with pytest.raises(RedisUnavailable):
        BlockingProducer("redis://127.0.0.1:1")
    assert not threads()


def test_threads_share_a_blocking_client(redis_url: str) -> None:
    states: list[State] = []
    with BlockingProducer(redis_url) as producer:

        def use(name: str) -> None:
            producer.submit("x", id=name)
            producer.cancel(name)
            states.append(producer.stream(name).collect().state)

        threads = [threading.Thread(target=use, args=(f"r{n}",)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert states == [State.CANCELLED] * 16


def test_closing_lets_go_of_threads_that_wait(redis_url: str) -> None:
    producer = BlockingProducer(redis_url)
    stream = producer.generate("x")
    errors: list[Exception] = []

    def read() -> None:
        try:
            next(stream)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with Redis.from_url(redis_url) as server:
        channel = Keys("demo", 0).channel(stream.id)
        wait_until(lambda: dict(server.pubsub_numsub(channel))[channel.encode()] == 1, "it waits")
    producer.close()
    reader.join(60)
    assert [str(error) for error in errors] == ["this producer is closed"]
    stream.close()  # harmless


def test_calls_that_race_with_close_end(redis_url: str) -> None:
    """A call that came when the loop had already stopped was never answered."""
    for _ in range(30):
        producer = BlockingProducer(redis_url)
        began = threading.Event()

        def call(producer: BlockingProducer = producer, began: threading.Event = began) -> None:
            while True:
                try:
                    producer.submit("x", id="same")
                except RuntimeError:
                    return
                began.set()

        callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
        for caller in callers:
            caller.start()
        assert began.wait(60)
        producer.close()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()


def in_a_fork(work: Callable[[], None]) -> int:
    """Do the work in a forked process; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_a_forked_process_is_told_to_make_its_own(redis_url: str) -> None:
    with BlockingProducer(redis_url) as producer:
        stream = producer.generate("x", id="r")

        def use() -> None:
            for call in (lambda: producer.submit("x"), lambda: next(stream)):
                with pytest.raises(RuntimeError, match=r"before fork\(\).*create one in each"):
                    call()
            stream.close()
            producer.close()
            with BlockingProducer(redis_url) as own:
                own.cancel("r")

        assert in_a_fork(use) == 0
        assert stream.collect().state is State.CANCELLED


def test_a_stream_that_another_event_loop_reads(redis_url: str) -> None:
    async def begin() -> tuple[Producer, TokenStream]:
        async with Client.from_url(redis_url) as client:
            producer = await Producer(redis_url).connect()
            stream = await producer.generate("x")
            writer = await LogWriter(client, stream.id).open()
            await writer.append(1)
            await anext(stream)
            with pytest.raises(TimeoutError):  # from here on it listens
                async with asyncio.timeout(0.05):
                    await anext(stream)
            return producer, stream

    with asyncio.Runner() as first, asyncio.Runner() as second:
        producer, stream = first.run(begin())
        for work in (anext(stream), producer.aclose()):
            with pytest.raises(RuntimeError, match="belongs to another event loop; make one"):
                second.run(awaited(work))
        first.run(producer.aclose())


async def awaited(work: Awaitable[object]) -> object:
    return await work

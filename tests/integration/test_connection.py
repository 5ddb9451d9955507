"""The worker's connections: commands packed in C, and one exchange at a time."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Connection, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.gpu_worker.connection import Link, connect

COMMANDS = [
    ("SET", "key", b"\x00\xff"),
    ("CONFIG GET", "maxmemory"),
    (b"EVALSHA", "0" * 40, 2, "ä", b"b", -1, 10**15, "x" * 7000, ""),
]


async def test_commands_are_packed_as_redis_py_packs_them() -> None:
    ours = connect("redis://localhost", timeout_s=1).connection_pool.make_connection()
    plain = Connection()
    for command in COMMANDS:
        assert b"".join(ours.pack_command(*command)) == b"".join(plain.pack_command(*command))
    assert b"".join(ours.pack_commands(COMMANDS)) == b"".join(plain.pack_commands(COMMANDS))


@pytest.mark.parametrize("url", ["rediss://localhost", "unix:///nowhere"])
async def test_every_kind_of_address_has_them(url: str) -> None:
    ours = connect(url, timeout_s=1).connection_pool.make_connection()
    assert b"".join(ours.pack_command("GET", "a")) == b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"


async def test_a_client_works_as_ever(redis_url: str) -> None:
    async with connect(redis_url, timeout_s=5) as redis:
        await redis.set("key", "value")
        assert await redis.get("key") == b"value"
        assert (await redis.config_get("maxmemory"))["maxmemory"] == "0"
        async with redis.pubsub() as pubsub:
            await pubsub.subscribe("channel")
            await redis.publish("channel", "hello")
            while (message := await pubsub.get_message(timeout=5))["type"] != "message":
                pass
            assert message["data"] == b"hello"


async def run(link: Link, *commands: tuple[object, ...]) -> list[object]:
    batch = link.pipeline()
    for command in commands:
        batch.execute_command(*command)
    return await batch.execute(raise_on_error=False)


async def test_a_batch_is_answered_in_order_and_errors_are_replies(redis_url: str) -> None:
    link = Link(redis_url, timeout_s=5)
    set_, wrong, got = await run(link, ("SET", "a", 1), ("LPUSH", "a", 1), ("GET", "a"))
    assert (set_, got) == (b"OK", b"1")
    assert isinstance(wrong, ResponseError)
    many = await asyncio.gather(*(run(link, ("ECHO", str(n))) for n in range(20)))
    assert many == [[str(n).encode()] for n in range(20)]
    await link.aclose()


async def test_a_server_that_does_not_answer_is_a_timeout_and_no_reply_is_left(
    redis_url: str,
) -> None:
    link = Link(redis_url, timeout_s=0.3)
    assert await run(link, ("PING",)) == [b"PONG"]
    with pytest.raises(RedisTimeoutError, match=r"no answer within 0.3 s"):
        await run(link, ("BLPOP", "nothing", 1))
    assert await run(link, ("ECHO", "after")) == [b"after"]
    await link.aclose()


async def test_a_cancelled_exchange_leaves_no_reply_for_the_next(redis_url: str) -> None:
    link = Link(redis_url, timeout_s=5)
    await run(link, ("PING",))
    waiting = asyncio.create_task(run(link, ("BLPOP", "nothing", 1), ("ECHO", "old")))
    async with connect(redis_url, timeout_s=5) as redis:
        while "blpop" not in [client["cmd"] for client in await redis.client_list()]:
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await run(link, ("ECHO", "new")) == [b"new"]
    await link.aclose()


async def test_a_cut_connection_is_an_error_once_and_then_made_again(redis_url: str) -> None:
    link = Link(redis_url, timeout_s=5)
    (ours,) = await run(link, ("CLIENT", "ID"))
    async with Redis.from_url(redis_url) as redis:
        assert await redis.execute_command("CLIENT", "KILL", "ID", ours) == 1
    with pytest.raises((RedisConnectionError, OSError)):
        await run(link, ("PING",))
    assert await run(link, ("PING",)) == [b"PONG"]
    await link.aclose()


async def test_no_server_is_an_error() -> None:
    link = Link("redis://127.0.0.1:1", timeout_s=1)
    with pytest.raises((RedisConnectionError, OSError)):
        await run(link, ("PING",))

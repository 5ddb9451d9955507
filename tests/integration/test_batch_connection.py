"""The worker's connections: commands encoded by whoever sends them, one exchange at a time."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Connection, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.redis.batch_connection import BatchConnection
from penstock.shared.redis.opening import open_client
from penstock.shared.redis.resp import Argument, KeyPair
from penstock.shared.scripts.script_loader import Call, Command, load_script

COMMANDS = [
    ("SET", "key", b"\x00\xff"),
    (b"EVALSHA", "0" * 40, 2, "ä", b"b", -1, 10**15, "x" * 7000, ""),
]


def test_commands_are_encoded_as_redis_py_encodes_them() -> None:
    plain = Connection()
    for command in COMMANDS:
        assert Command(command).wire() == b"".join(plain.pack_command(*command))


@pytest.mark.parametrize("by_source", [False, True])
def test_a_call_is_the_same_command_in_both_forms(by_source: bool) -> None:
    pairs = [KeyPair.of("record:", "log:", f"request-{n}") for n in range(3)]
    call = Call(load_script("append"), ("first", b"second"), ("ä", 1, b"\xff"), pairs)
    command = call.command(by_source=by_source)
    assert command[2:] == (
        8, "first", b"second", "record:request-0", "log:request-0", "record:request-1",
        "log:request-1", "record:request-2", "log:request-2", "ä", 1, b"\xff",
    )  # fmt: skip
    assert call.wire(by_source=by_source) == Command(command).wire()


@pytest.mark.parametrize("url", ["rediss://localhost", "unix:///nowhere"])
async def test_every_kind_of_address_is_tried(url: str) -> None:
    with pytest.raises((RedisConnectionError, OSError)):
        await run(BatchConnection(url, timeout_s=1), ("PING",))


async def test_a_client_works_as_ever(redis_url: str) -> None:
    async with open_client(redis_url, timeout_s=5) as redis:
        await redis.set("key", "value")
        assert await redis.get("key") == b"value"
        assert (await redis.config_get("maxmemory"))["maxmemory"] == "0"
        async with redis.pubsub() as pubsub:
            await pubsub.subscribe("channel")
            await redis.publish("channel", "hello")
            while (message := await pubsub.get_message(timeout=60))["type"] != "message":
                pass
            assert message["data"] == b"hello"


async def run(connection: BatchConnection, *commands: tuple[Argument, ...]) -> list[object]:
    return await connection.exchange([Command(command).wire() for command in commands])


async def test_a_batch_is_answered_in_order_and_errors_are_replies(redis_url: str) -> None:
    connection = BatchConnection(redis_url, timeout_s=5)
    set_, wrong, got = await run(connection, ("SET", "a", 1), ("LPUSH", "a", 1), ("GET", "a"))
    assert (set_, got) == (b"OK", b"1")
    assert isinstance(wrong, ResponseError)
    many = await asyncio.gather(*(run(connection, ("ECHO", str(n))) for n in range(20)))
    assert many == [[str(n).encode()] for n in range(20)]
    await connection.aclose()


async def test_a_server_that_does_not_answer_is_a_timeout_and_no_reply_is_left(
    redis_url: str,
) -> None:
    connection = BatchConnection(redis_url, timeout_s=0.3)
    assert await run(connection, ("PING",)) == [b"PONG"]
    with pytest.raises(RedisTimeoutError, match=r"no answer within 0.3 s"):
        await run(connection, ("BLPOP", "nothing", 1))
    assert await run(connection, ("ECHO", "after")) == [b"after"]
    await connection.aclose()


async def test_a_cancelled_exchange_leaves_no_reply_for_the_next(redis_url: str) -> None:
    connection = BatchConnection(redis_url, timeout_s=5)
    await run(connection, ("PING",))
    waiting = asyncio.create_task(run(connection, ("BLPOP", "nothing", 1), ("ECHO", "old")))
    async with open_client(redis_url, timeout_s=5) as redis:
        while "blpop" not in [client["cmd"] for client in await redis.client_list()]:
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await run(connection, ("ECHO", "new")) == [b"new"]
    await connection.aclose()


async def test_a_cut_connection_is_an_error_once_and_then_made_again(redis_url: str) -> None:
    connection = BatchConnection(redis_url, timeout_s=5)
    (ours,) = await run(connection, ("CLIENT", "ID"))
    async with Redis.from_url(redis_url) as redis:
        assert await redis.execute_command("CLIENT", "KILL", "ID", ours) == 1
    with pytest.raises((RedisConnectionError, OSError)):
        await run(connection, ("PING",))
    assert await run(connection, ("PING",)) == [b"PONG"]
    await connection.aclose()


async def test_no_server_is_an_error() -> None:
    connection = BatchConnection("redis://127.0.0.1:1", timeout_s=1)
    with pytest.raises((RedisConnectionError, OSError)):
        await run(connection, ("PING",))

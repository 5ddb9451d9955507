"""What a worker says of a server on which it will not start."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from penstock.producer import Producer
from penstock.shared.errors import RedisUnavailable
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.redis.server_check import check_durability


async def refusal(url: str) -> str:
    with pytest.raises(RedisUnavailable) as caught:
        await check_durability(url, "key", timeout_s=1)
    return str(caught.value)


async def test_what_is_wrong_with_a_server_is_named_with_the_remedy(
    start_redis: Callable[..., EmbeddedRedis],
) -> None:
    server = start_redis(password="right")
    assert "check user and password" in await refusal(server.url.replace("right", "wrong"))
    assert "DB index is out of range; check database" in await refusal(server.url[:-1] + "999")
    async with Redis.from_url(server.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        assert "CONFIG SET maxmemory-policy noeviction" in await refusal(server.url)
        await client.config_set("maxmemory-policy", "noeviction")
        await check_durability(server.url, "key", timeout_s=1)
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert "read only replica; point REDIS_URL or --redis to its primary" in await refusal(
            server.url
        )
        await client.config_set("replica-read-only", "no")
        await check_durability(server.url, "key", timeout_s=1)
    assert "must be redis:// unless it speaks TLS" in await refusal("rediss" + server.url[5:])
    server.stop()
    assert "start the server, or set REDIS_URL" in await refusal(server.url)


REPLIES = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "banner": b"SSH-2.0-OpenSSH_9.2\r\n",
    "memcached": b"ERROR\r\n",
    "zeros": bytes(64),
    "ok": b"+OK\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "array": b"*1\r\n$2\r\nhi\r\n",
}


@pytest.fixture
async def other_server(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The URL of a server that gives the same reply to every command."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while sent := await reader.read(1 << 16):
                writer.write(request.param * sent.count(b"*"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.mark.parametrize("other_server", REPLIES.values(), ids=REPLIES, indirect=True)
async def test_a_server_that_speaks_no_redis_is_named(other_server: str) -> None:
    assert "does not speak Redis: " in await refusal(other_server)
    with pytest.raises(RedisUnavailable, match=r"does not speak Redis: .*; set REDIS_URL"):
        await Producer(other_server).connect()


@pytest.mark.parametrize("other_server", [REPLIES["http"]], indirect=True)
@pytest.mark.parametrize(
    "command", [("submit", "hello"), ("stream", "x"), ("cancel", "x"), ("dlq", "list")]
)
async def test_commands_against_a_server_that_speaks_no_redis(
    other_server: str, command: tuple[str, ...]
) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "penstock.producer.cli", *command, "--redis", other_server],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "does not speak Redis: " in done.stderr
    assert "Traceback" not in done.stderr

"""The proxy does what it says: a storm is worth no more than its faults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from waiting import wait_until_async

from penstock.tools.chaos.faults.storm_server import OwnServer, through
from penstock.tools.chaos.faults.tcp_proxy import Proxy

Wired = tuple[OwnServer, Proxy, Redis]


@pytest.fixture(params=[False])
async def wired(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Wired]:
    """A server, a proxy before it, and a client behind the proxy."""
    async with (
        OwnServer(tmp_path) as server,
        Proxy(server.host, server.port, narrow=request.param) as proxy,
    ):
        client: Redis = Redis.from_url(
            through(server.url, proxy.port), socket_timeout=0.3, retry=Retry(NoBackoff(), 0)
        )
        await client.ping()
        yield server, proxy, client
        await client.aclose()


async def value(server: OwnServer, key: str) -> int:
    return int(await server.command("GET", key) or 0)


async def test_sound_until_told_otherwise(wired: Wired) -> None:
    _, proxy, client = wired
    blob = bytes(range(256)) * 4096
    await client.set("x", blob)
    assert await client.get("x") == blob
    assert (proxy.open, proxy.connections, proxy.resets) == (1, 1, 0)


async def test_reset(wired: Wired) -> None:
    server, proxy, client = wired
    assert proxy.reset() == 1
    with pytest.raises(RedisConnectionError):
        await client.incr("x")
    assert await value(server, "x") == 0
    assert await client.incr("x") == 1, "the next connection is sound"


async def test_cut_reply_comes_after_the_execution(wired: Wired) -> None:
    server, proxy, client = wired
    proxy.cut_replies(b"INCR")
    await client.set("y", 1)  # another request passes
    with pytest.raises(RedisConnectionError):
        await client.incr("x")
    assert (await value(server, "x"), proxy.cuts) == (1, 1)
    assert await client.incr("x") == 2


async def test_silently_cut_reply_leaves_the_client_waiting(wired: Wired) -> None:
    server, proxy, client = wired
    proxy.cut_replies(b"INCR", silently=True)
    with pytest.raises(RedisTimeoutError):
        await client.incr("x")
    assert (await value(server, "x"), proxy.cuts) == (1, 1)


async def test_half_open(wired: Wired) -> None:
    server, proxy, client = wired
    assert proxy.deafen(5.0) == 1
    with pytest.raises(RedisTimeoutError):
        await client.incr("x")
    assert await value(server, "x") == 0, "nothing arrived"
    assert int((await server.command("INFO", "clients"))["connected_clients"]) == 2
    assert await client.incr("x") == 1


async def test_late_delivery_comes_after_the_sender_has_given_up(wired: Wired) -> None:
    server, proxy, client = wired
    proxy.hold_back(3)
    began = time.monotonic()
    with pytest.raises(RedisTimeoutError):
        await client.incr("x")
    assert await value(server, "x") == 0
    async with asyncio.timeout(60):
        while not await value(server, "x"):
            await asyncio.sleep(0.01)
    assert time.monotonic() - began >= 3


async def test_delay_goes_both_ways(wired: Wired) -> None:
    _, proxy, client = wired
    proxy.delay(0.1)
    began = time.monotonic()
    await client.ping()
    assert time.monotonic() - began >= 0.2
    proxy.heal()

    async def is_quick() -> bool:
        began = time.monotonic()
        await client.ping()
        return time.monotonic() - began < 0.2

    await wait_until_async(is_quick, "the delay is over")


@pytest.mark.parametrize("wired", [True], indirect=True)
async def test_choked_subscriber_is_cut_by_the_server(wired: Wired) -> None:
    server, proxy, client = wired
    async with asyncio.timeout(100):
        # A slow machine may be past the pause, or past the moment of its end, when it looks.
        while not proxy.server_cuts:
            with contextlib.suppress(RedisConnectionError, RedisTimeoutError):
                await _choke_a_subscriber(server, proxy, client)


async def _choke_a_subscriber(server: OwnServer, proxy: Proxy, client: Redis) -> None:
    proxy.choke(3.0)
    await client.connection_pool.disconnect()
    async with client.pubsub() as pubsub, server.client() as publisher:
        await pubsub.subscribe("x")
        while await publisher.publish("x", b"y" * 1000):
            await asyncio.sleep(0.001)
        proxy.heal()
        for _ in range(200):
            if proxy.server_cuts:
                return
            await asyncio.sleep(0.01)


async def test_nobody_is_let_in_while_the_server_is_away(wired: Wired) -> None:
    server, _, client = wired
    restart = asyncio.create_task(server.kill_and_restart(0.3))
    await asyncio.sleep(0.05)
    with pytest.raises(RedisConnectionError):
        await client.incr("x")
    await restart
    assert server.kills == 1
    assert server.longest_down_s >= 0.3
    assert await client.incr("x") == 1


async def test_killed_server_has_what_it_acknowledged(wired: Wired) -> None:
    server, _, _ = wired
    client = server.client()
    for number in range(5):
        acknowledged = 0
        async with asyncio.timeout(10):
            while acknowledged < 50:
                acknowledged = await client.incr(f"k{number}")
        await server.kill_and_restart(0.0)
        await client.connection_pool.disconnect()
        assert await value(server, f"k{number}") == 50
    await client.aclose()


async def test_a_restarted_server_has_loaded_its_file(tmp_path: Path) -> None:
    """INFO answers while it loads; a command of the storm would be refused then."""
    incr = b"*2\r\n$4\r\nINCR\r\n$3\r\nkey\r\n"
    (tmp_path / "appendonly.aof").write_bytes(incr * 150_000)
    async with OwnServer(tmp_path) as server:
        assert await server.command("GET", "key") == b"150000"


async def test_connections_that_just_came_are_closed_with_the_proxy(tmp_path: Path) -> None:
    """In whatever state they are: not taken up yet, being connected, or forwarded."""
    async with OwnServer(tmp_path) as server:
        for turns in range(12):
            proxy = Proxy(server.host, server.port)
            async with proxy:
                reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
                for _ in range(turns):
                    await asyncio.sleep(0)
            try:
                assert await asyncio.wait_for(reader.read(), 10) == b""
            except ConnectionResetError:
                assert proxy.connections == 1
            assert proxy.open == 0
            writer.close()

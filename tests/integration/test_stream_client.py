"""The client against the real scripts: submit, cancel, status, errors; and its blocking form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from penstock.producer import Producer
from penstock.shared.errors import (
    ConfigurationError,
    IdConflict,
    InvalidRequest,
    QueueFull,
    RedisUnavailable,
    RequestFailed,
)
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Lane, Reason, State
from penstock.shared.settings import load_settings

Client = redis.asyncio.Redis


@pytest.fixture
async def producer(any_redis_url: str) -> AsyncIterator[Producer]:
    async with Producer(any_redis_url) as producer:
        yield producer


async def test_what_is_submitted_is_what_is_stored(producer: Producer, any_redis_url: str) -> None:
    submitted = await producer.submit(
        "The list type", id="a.1", lane="critical", tenant="docs", max_tokens=5, stop="\n"
    )
    assert (submitted.id, submitted.state, submitted.n) == ("a.1", State.QUEUED, 0)
    assert (submitted.duplicate, submitted.waiting) == (False, 1)
    async with Client.from_url(any_redis_url) as client:
        payload = await client.hget(producer.keys.request("a.1"), "payload")  # type: ignore[misc]
    assert Request.unpack(payload) == Request.build(
        id="a.1", prompt="The list type", lane="critical", tenant="docs", max_tokens=5, stop=["\n"]
    )
    status = await producer.status("a.1")
    assert (status.state, status.lane, status.tenant) == (State.QUEUED, Lane.CRITICAL, "docs")
    assert (status.n, status.end) == (0, None)


async def test_the_same_id_runs_once(producer: Producer) -> None:
    first, *others = await asyncio.gather(*(producer.submit("p", id="same") for _ in range(50)))
    answers = [first.duplicate, *(other.duplicate for other in others)]
    assert answers.count(False) == 1
    with pytest.raises(IdConflict, match="'same' was already submitted"):
        await producer.submit("another", id="same")
    ids = {(await producer.submit("p")).id for _ in range(10)}
    assert len(ids) == 10


async def test_bad_requests_are_refused_before_anything_is_sent(producer: Producer) -> None:
    for wrong in (
        {"prompt": ""},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "lane": "urgent"},
        {"prompt": "x", "id": ""},
        {"prompt": "x", "max_token": 5},
    ):
        with pytest.raises(InvalidRequest) as caught:
            await producer.submit(**wrong)  # type: ignore[arg-type]
        assert caught.value.field == list(wrong)[-1]


@pytest.mark.parametrize("wrong", ["\ud800", "", "a b", 7, None])
async def test_what_is_no_id_is_refused(producer: Producer, wrong: Any) -> None:
    for call in (producer.cancel, producer.status, producer.result):
        with pytest.raises(InvalidRequest, match=r"^id: got "):
            await call(wrong)
    with pytest.raises(InvalidRequest, match=r"^id: got "):
        producer.stream(wrong)


async def test_arguments_of_a_stream_that_are_none(producer: Producer) -> None:
    for wrong in (-1, "5", float("nan"), True):
        with pytest.raises(InvalidRequest, match=r"^timeout: got "):
            producer.stream("r", timeout=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"^timeout: got "):
            await producer.result("r", timeout=wrong)  # type: ignore[arg-type]
    for wrong in (-1, "5", 1 << 32):
        with pytest.raises(InvalidRequest, match=r"^from_digest: got "):
            producer.stream("r", from_digest=wrong)  # type: ignore[arg-type]


async def test_a_read_only_replica_is_named(start_redis: Callable[..., EmbeddedRedis]) -> None:
    replica = start_redis(password="")
    async with (
        Client.from_url(replica.url) as client,
        Producer(replica.url, outage_s=0.1) as producer,
    ):
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for call in (producer.submit("x"), producer.cancel("r")):
            with pytest.raises(RedisUnavailable, match=r"read only replica.*primary"):
                await call


async def test_a_full_queue(any_redis_url: str) -> None:
    settings = load_settings({"queue.max_queued_requests": 3})
    async with Producer(any_redis_url, settings=settings) as producer:
        for _ in range(3):
            await producer.submit("x")
        with pytest.raises(QueueFull) as caught:
            await producer.submit("x")
        assert (caught.value.bound, caught.value.limit) == ("requests", 3)


async def test_cancel_ends_a_request_and_its_readers_at_once(producer: Producer) -> None:
    submitted = await producer.submit("x")
    reading = asyncio.create_task(producer.result(submitted.id))
    reply = await producer.cancel(submitted.id)
    assert (reply.changed, reply.state) == (True, State.CANCELLED)
    with pytest.raises(RequestFailed) as caught:
        await reading
    assert (caught.value.state, caught.value.reason) == ("cancelled", "client")
    result = await producer.result(submitted.id, check=False)
    assert (result.text, result.token_ids, result.reason) == ("", (), Reason.CLIENT)
    assert (await producer.cancel(submitted.id)).changed is False
    end = (await producer.status(submitted.id)).end
    assert end is not None
    assert end.reason is Reason.CLIENT


async def test_scripts_the_server_forgot_are_sent_again(
    producer: Producer, any_redis_url: str
) -> None:
    async with Client.from_url(any_redis_url) as client:
        await producer.submit("x")
        await client.script_flush()
        assert (await producer.submit("x")).waiting == 2


async def test_killed_command_connections_are_invisible(
    producer: Producer, any_redis_url: str
) -> None:
    async with Client.from_url(any_redis_url) as client:
        for i in range(20):
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert (await producer.submit("x", id=f"r{i}")).waiting == i + 1


async def test_a_client_of_the_callers_stays_open(any_redis_url: str) -> None:
    async with Client.from_url(any_redis_url) as client:
        async with Producer(client) as producer:
            await producer.submit("x")
        assert await client.ping()
    decoding = Client.from_url(any_redis_url, decode_responses=True)
    with pytest.raises(ConfigurationError, match="without decode_responses"):
        Producer(decoding)


async def test_servers_that_cannot_be_used(start_redis: Callable[..., EmbeddedRedis]) -> None:
    server = start_redis(password="right")
    with pytest.raises(RedisUnavailable, match="refuses access") as caught:
        await Producer(server.url.replace("right", "wrong")).connect()
    assert "wrong" not in str(caught.value)
    with pytest.raises(RedisUnavailable, match="refuses access"):
        await Producer(server.url.replace("default:right@", "")).connect()
    server.stop()
    began = time.monotonic()
    with pytest.raises(RedisUnavailable, match="cannot reach Redis at redis://") as caught:
        await Producer(server.url).connect()
    assert time.monotonic() - began < 10
    assert "right" not in str(caught.value)
    with pytest.raises(RedisUnavailable, match="no Redis server is configured"):
        Producer()
    with pytest.raises(ConfigurationError, match="http://localhost cannot be used"):
        Producer("http://localhost")

"""What a running gateway charges a key for, when it looks at the key, and what it gives back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from gateway.rig import GatewayProcess
from starlette.datastructures import Headers
from starlette.requests import Request
from waiting import wait_until_async

from penstock.producer.batches.webhooks.request_ends import RequestWatch
from penstock.producer.cli import main
from penstock.producer.gateway.access.key_access import KeyAccess
from penstock.producer.gateway.access.key_records import KeyRecord, Limits
from penstock.producer.gateway.access.key_store import KeyStore
from penstock.producer.gateway.api_errors import ApiError
from penstock.producer.gateway.gateway import Gateway, Submission
from penstock.producer.gateway.model_directory import ModelDirectory, Shard
from penstock.producer.gateway.openai.fields.completion_fields import COMPLETION_FIELDS
from penstock.producer.results import Status
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.states import Lane, State
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import load_settings

BODY = {"model": "nobody", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True}
"""It waits for a worker that never comes; a keep-alive comment brings its status."""

POSTED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank",
    "/v1/classify", "/v1/infer", "/tokenize", "/detokenize", "/v1/batches", "/v1/files",
)  # fmt: skip


@pytest.fixture(scope="module")
def locked(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway that refuses every call without a key."""
    assert main(["keys", "create", "--tenant", "first", "--json", "--redis", server.url]) == 0
    process = GatewayProcess(
        server.url,
        folder / "locked.log",
        gateway__extra_models="nobody",
        gateway__keep_alive_s=0.4,
    )
    yield process
    process.kill()


def create_key(
    capsys: pytest.CaptureFixture[str], server: EmbeddedRedis, *limits: str
) -> tuple[str, str]:
    """The secret and the id of a new key."""
    capsys.readouterr()
    words = ["keys", "create", "--tenant", "acme", *limits, "--json", "--redis", server.url]
    assert main(words) == 0
    made = json.loads(capsys.readouterr().out)
    return made["secret"], made["id"]


def ask(gateway: GatewayProcess, secret: str, **more: Any) -> httpx.Response:
    """The head of a streamed answer, which is then left."""
    headers = {"authorization": f"Bearer {secret}", **more.pop("headers", {})}
    url = f"{gateway.url}/v1/completions"
    with httpx.stream("POST", url, json={**BODY, **more}, headers=headers, timeout=60) as response:
        return response


@pytest.mark.parametrize("limit", ["--concurrent", "--requests-per-minute"])
def test_a_second_call_with_its_key_joins_whatever_the_limits(
    locked: GatewayProcess, server: EmbeddedRedis, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    secret, _ = create_key(capsys, server, limit, "1", "--tokens-per-minute", "1000")
    first = {"idempotency-key": f"first {limit}"}
    given = [
        ask(locked, secret, headers=first),
        ask(locked, secret, headers={**first, "last-event-id": "0"}),
        ask(locked, secret, headers=first),
    ]
    assert [one.status_code for one in given] == [200] * 3
    assert {one.headers["x-ratelimit-remaining-tokens"] for one in given} == {"990"}
    # The first request goes on, and is the one that counts.
    refused = ask(locked, secret, headers={"idempotency-key": f"second {limit}"})
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-limit-tokens"] == "1000"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "990"


def test_nobody_is_asked_for_a_body_without_a_key(locked: GatewayProcess) -> None:
    """The body never comes: who wants to read it first would answer 408 half a minute later."""
    for path in POSTED:
        with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: 1000000\r\n\r\n".encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 "), path


def test_a_place_is_given_back_when_the_vocabulary_cannot_be_read(
    locked: GatewayProcess, server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, key_id = create_key(capsys, server, "--concurrent", "1")
    other, _ = create_key(capsys, server)
    card = Keys("nobody", 0).model_card
    with redis.Redis.from_url(server.url) as client:
        ask(locked, other)  # looks at the workers, so that the next one need not
        client.set(card, "no card")
        try:
            refused = ask(locked, secret, logprobs=1)
        finally:
            client.delete(card)
        assert refused.status_code == 503
        assert client.zcard(f"ps:{{gateway}}:leases:{key_id}") == 0


class Late(ModelDirectory):
    """What it knows of requests is not so any more."""

    seen: Status | None = None
    """What it says of every request; None: that there is none."""

    async def locate(self, request_id: str) -> tuple[Shard, Status] | None:
        if self.seen is None:
            return None
        return await self.choose("nobody", request_id), self.seen


@asynccontextmanager
async def opened(url: str, limits: Limits) -> AsyncIterator[tuple[Gateway, Late, str]]:
    """The parts of a gateway in this process, and the secret of a key."""
    settings = load_settings({"redis.url": url, "gateway.extra_models": "nobody"})
    directory, access = Late(settings), KeyAccess(settings, required=True)
    async with AsyncExitStack() as stack:
        client = RetryingClient(url)
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(directory.aclose)
        stack.push_async_callback(access.aclose)
        await directory.connect()
        await access.connect()
        secret, _ = await KeyStore(client).create(KeyRecord("", "acme", limits=limits))
        yield Gateway(settings, access, directory, RequestWatch(client)), directory, secret


async def submit(gateway: Gateway, secret: str, key: str) -> Submission:
    headers = {"authorization": f"Bearer {secret}", "idempotency-key": key}
    return await gateway.submit(
        Request({"type": "http", "headers": Headers(headers).raw}),
        COMPLETION_FIELDS,
        prefix="cmpl-",
        model="nobody",
        lane=Lane.NORMAL,
        fields={"prompt": [1, 2, 3], "max_tokens": 7},
        note={},
        body={},
    )


async def test_the_later_of_two_first_calls_gives_back_what_it_was_charged(
    server: EmbeddedRedis,
) -> None:
    """Both look for the request before either has submitted it."""
    limits = Limits(requests_per_minute=2, concurrent=2)
    async with opened(server.url, limits) as (gateway, _, secret):
        first, later = [await submit(gateway, secret, "at once") for _ in range(2)]
        assert first.id == later.id
        with pytest.raises(ApiError):
            await submit(gateway, secret, "one more")
        await later.admission.release()
        other = await submit(gateway, secret, "one more")
        assert other.admission.headers["x-ratelimit-remaining-requests"] == "0"


async def test_one_task_looks_for_the_ends_of_all_requests_that_go_on(
    server: EmbeddedRedis,
) -> None:
    async with opened(server.url, Limits(concurrent=20)) as (gateway, directory, secret):
        going_on = [await submit(gateway, secret, f"goes on {i}") for i in range(20)]
        tasks = len(asyncio.all_tasks())
        for submission in going_on:
            await submission.admission.release()
        assert len(asyncio.all_tasks()) == tasks
        producer = (await directory.choose("nobody", "any")).producer
        for submission in going_on:
            await producer.cancel(submission.id)

        async def is_free() -> bool:
            try:
                await submit(gateway, secret, "one more")
            except ApiError:
                return False
            return True

        await wait_until_async(is_free, "their places are given back")


async def test_who_joins_a_request_that_is_forgotten_is_charged(server: EmbeddedRedis) -> None:
    """Its retention ended between the look at it and the submission."""
    limits = Limits(requests_per_minute=1)
    async with opened(server.url, limits) as (gateway, directory, secret):
        shard = await directory.choose("nobody", "seen")
        await shard.producer.submit([1], id="seen")
        directory.seen = await shard.producer.status("seen")
        first = await submit(gateway, secret, "forgotten 1")
        assert first.admission.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(ApiError) as caught:
            await submit(gateway, secret, "forgotten 2")
        assert caught.value.code == "rate_limit_exceeded"
        joined = await submit(gateway, secret, "forgotten 1")
        assert joined.id == first.id
        refused = "cmpl-" + first.caller.id_of("forgotten 2")
        assert (await shard.producer.status(refused)).state is State.CANCELLED

"""Webhooks of single requests: from a shell, over HTTP, and of a batch over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from batches.conftest import completion_lines, drive
from batches.receiver import Receiver
from batches.test_webhooks import SECRETS
from gateway.rig import GatewayProcess
from waiting import wait_until_async

from penstock.producer import Producer
from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.webhooks.caller import WebhookCaller
from penstock.producer.batches.webhooks.deliveries import signing_keys
from penstock.producer.batches.webhooks.request_ends import RequestWatch
from penstock.producer.cli.app import main
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

pytestmark = pytest.mark.usefixtures("synthetic_worker")
HEADER = "x-penstock-webhook"


@pytest.fixture(scope="module")
def gateway(server: EmbeddedRedis, settings: Settings, folder: Path) -> Iterator[GatewayProcess]:
    storage = settings.batches.storage
    process = GatewayProcess(server.url, folder / "gateway.log", batches__storage=storage)
    yield process
    process.kill()


@pytest.fixture
async def producer(server: EmbeddedRedis) -> AsyncIterator[Producer]:
    async with Producer(server.url, model="letters") as producer:
        yield producer


async def call_all(service: BatchService) -> None:
    """What ``penstock batches`` does every few seconds."""
    await service.request_ends.queue_calls()
    caller = WebhookCaller(signing_keys(SECRETS), allow_private=True)
    for name in await service.deliveries.due():
        assert await service.deliveries.attempt(name, caller)


def events(receiver: Receiver) -> list[tuple[str, str]]:
    bodies = [json.loads(body) for _, body in receiver.calls]
    return [(body["type"], body["data"]["id"]) for body in bodies]


async def test_from_a_shell(
    service: BatchService, producer: Producer, receiver: Receiver, server: EmbeddedRedis
) -> None:
    command = ["submit", "hi", "--model", "letters", "--max-tokens", "4", "--no-stream"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.producer.cli", *command, "--id", "shell"),
        *("--redis", server.url, "--webhook", receiver.url),
    )
    assert await process.wait() == 0
    await producer.result("shell", timeout=60)
    await call_all(service)
    await call_all(service)
    assert events(receiver) == [("response.incomplete", "shell")]  # it was at its last token


def test_a_shell_hears_of_a_wrong_url(
    server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["submit", "hi", "--model", "letters", "--no-stream", "--redis", server.url]
    assert main([*arguments, "--webhook", "ftp://x"]) == 2
    assert "webhook" in capsys.readouterr().err


async def test_only_what_has_ended_is_called(
    service: BatchService, client: RetryingClient, producer: Producer, receiver: Receiver
) -> None:
    watch = RequestWatch(client)
    open_one = await producer.submit("hi", id="long", max_tokens=100_000, ignore_eos=True)
    for name in (open_one.id, "forgotten"):
        await watch.watch(producer.keys, name, receiver.url)
    await call_all(service)
    assert events(receiver) == [("response.failed", "forgotten")]
    await producer.cancel("long")
    await call_all(service)
    assert events(receiver)[1:] == [("response.cancelled", "long")]


async def test_response_over_http_outlives_its_client(
    gateway: GatewayProcess, service: BatchService, receiver: Receiver
) -> None:
    body = {"model": "letters", "input": "hi", "max_output_tokens": 4, "background": True}
    answer = await post(gateway, "/v1/responses", receiver.url, body)
    assert answer.status_code == 200
    await until_called(service, receiver)
    [(headers, sent)] = receiver.calls
    client = openai.OpenAI(api_key="none", webhook_secret=SECRETS[0])
    event = client.webhooks.unwrap(sent, headers)
    assert isinstance(event, openai.types.webhooks.ResponseIncompleteWebhookEvent)
    assert event.data.id == answer.json()["id"]


async def test_batch_over_http(
    gateway: GatewayProcess, service: BatchService, receiver: Receiver
) -> None:
    form = {"file": ("x.jsonl", completion_lines(3)), "purpose": (None, "batch")}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        file = (await http.post("/v1/files", files=form)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await post(gateway, "/v1/batches", receiver.url, body)).json()["id"]
    await drive(service, await service.batches.get(batch))
    await call_all(service)
    assert events(receiver) == [("batch.completed", batch)]


@pytest.mark.parametrize("url", ["ftp://x", "http://user@host/", ""])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batches"])
async def test_header_that_is_no_url_is_refused(
    gateway: GatewayProcess, path: str, url: str
) -> None:
    body = {
        "/v1/completions": {"model": "letters", "prompt": "hi", "max_tokens": 1},
        "/v1/batches": {
            "input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h",
        },
    }[path]  # fmt: skip
    answer = await post(gateway, path, url, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "webhook")


async def post(gateway: GatewayProcess, path: str, webhook: str, body: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        return await client.post(path, json=body, headers={HEADER: webhook})


async def until_called(service: BatchService, receiver: Receiver) -> None:
    async def called() -> bool:
        await call_all(service)
        return bool(receiver.calls)

    await wait_until_async(called, "the webhook is called", 60)

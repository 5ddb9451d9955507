"""Batches from their input to their output."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from batches.conftest import completion_lines, drive, read_lines, start
from openai.types.responses import Response
from prometheus_client import generate_latest
from waiting import wait_until_async

from penstock.producer import Producer
from penstock.producer.batches.batch_metrics import BatchMetrics
from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.stores.batch_store import BatchChanged
from penstock.producer.batches.stores.records import Batch, BatchState
from penstock.shared.errors import ConfigurationError
from penstock.shared.keys import BatchKeys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.states import State
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings, load_settings


async def test_every_line_is_answered_once(synthetic_worker: None, service: BatchService) -> None:
    batch = await drive(service, await start(service, completion_lines(600)))
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 600, 0)
    assert batch.usage.output_tokens == 600 * 8
    lines = await read_lines(service, batch.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"line {i}" for i in range(600))
    body = lines[0]["response"]["body"]
    assert lines[0]["response"]["status_code"] == 200
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 8
    assert batch.error_file_id is None


async def test_lines_may_name_the_responses_endpoint(
    synthetic_worker: None, service: BatchService
) -> None:
    data = b""
    for number in range(3):
        body = {"model": "letters", "input": f"Say {number}.", "max_output_tokens": 6}
        fields = {"custom_id": str(number), "method": "POST", "url": "/v1/responses"}
        data += json.dumps({**fields, "body": body}).encode() + b"\n"
    batch = await drive(service, await start(service, data, endpoint="/v1/responses"))
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 3, 0)
    for line in await read_lines(service, batch.output_file_id):
        response = Response.model_validate(line["response"]["body"])
        assert response.status in ("completed", "incomplete")
        assert len(response.output_text) > 0
        assert response.usage is not None
        assert response.usage.output_tokens <= 6


async def test_lines_that_fail_go_to_the_error_file(
    synthetic_worker: None, service: BatchService
) -> None:
    good = completion_lines(3)
    long = {"model": "letters", "prompt": [1] * 70_000, "max_tokens": 4}
    bad = {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": long}
    metrics = BatchMetrics()
    batch = await drive(service, await start(service, good + json.dumps(bad).encode()), metrics)
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 3, 1)
    page = generate_latest(metrics.registry).decode()
    for line in (
        'penstock_batch_lines_total{outcome="answered"} 3.0',
        'penstock_batch_lines_total{outcome="failed"} 1.0',
        'penstock_batch_tokens_total{kind="output"} 24.0',
        'penstock_batches_ended_total{state="completed"} 1.0',
        "penstock_batches_driven 0.0",
    ):
        assert line in page.splitlines()
    [line] = await read_lines(service, batch.error_file_id)
    assert line["custom_id"] == "long"
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_storage_may_be_any_file_system(
    synthetic_worker: None, server: EmbeddedRedis
) -> None:
    settings = load_settings({"redis.url": server.url, "batches.storage": "memory://batches/x"})
    client = RetryingClient(server.url)
    await client.connect(BatchKeys().active)
    service = BatchService(client, settings)
    batch = await drive(service, await start(service, completion_lines(5)))
    assert (batch.state, batch.completed) == (BatchState.COMPLETED, 5)
    assert len(await read_lines(service, batch.output_file_id)) == 5
    await service.aclose()
    await client.aclose()


async def test_cancelled_batch_hands_out_what_has_ended(
    synthetic_worker: None, service: BatchService
) -> None:
    batch = await start(service, completion_lines(2000, max_tokens=64))

    async def is_amid() -> bool:
        return (await service.batches.get(batch.id)).completed > 0

    driving = asyncio.create_task(drive(service, batch))
    await wait_until_async(is_amid, "the batch is in progress", 60)
    await service.cancel(batch.id, "tests")
    batch = await driving
    assert batch.state is BatchState.CANCELLED
    assert 0 < batch.completed < 2000
    assert batch.completed + batch.failed == 2000
    assert len(await read_lines(service, batch.output_file_id)) == batch.completed
    errors = await read_lines(service, batch.error_file_id)
    assert {line["error"]["code"] for line in errors if line["error"]} == {"batch_cancelled"}


async def test_line_whose_submission_is_not_recorded_is_cancelled_with_its_batch(
    client: RetryingClient, settings: Settings
) -> None:
    """As a driver leaves it that dies in between, or that a cancel precedes."""
    flags = {"redis.url": settings.redis.url, "batches.storage": settings.batches.storage}
    settings = load_settings({**flags, "batches.in_flight": 3})
    service = BatchService(client, settings)
    batch = await start(service, completion_lines(7, model="nobody"))
    driver = service.driver(BatchMetrics())
    while batch.next_line < 3:
        await driver.tick(batch.id, budget_s=0.2)
        batch = await service.batches.get(batch.id)
    async with Producer(model="nobody", settings=settings) as producer:
        for number in (4, 6):
            await producer.submit("x", id=batch.request_id(number))
        await service.cancel(batch.id, "tests")
        batch = await drive(service, batch)
        ids = [batch.request_id(number) for number in range(1, 8)]
        states = await producer.states(ids)
    assert states == [State.CANCELLED] * 4 + [None, State.CANCELLED, None]
    assert (batch.state, batch.completed, batch.failed) == (BatchState.CANCELLED, 0, 7)
    errors = await read_lines(service, batch.error_file_id)
    assert {line["custom_id"] for line in errors} == {f"line {i}" for i in range(7)}
    await service.aclose()


async def test_expired_batch_hands_out_what_has_ended_and_cancels_the_rest(
    synthetic_worker: None, service: BatchService, settings: Settings
) -> None:
    """More lines than may be in flight, and none of the long ones ends for minutes."""
    short = completion_lines(20, max_tokens=2)
    long = completion_lines(300, prompt="to be continued", max_tokens=60_000)
    long = long.replace(b'"custom_id": "line', b'"custom_id": "long')
    batch = await start(service, short + long)

    async def shorts_have_ended() -> bool:
        return (await service.batches.get(batch.id)).completed == 20

    driving = asyncio.create_task(drive(service, batch))
    await wait_until_async(shorts_have_ended, "the short lines have ended", 60)
    await expire_soon(service, batch)
    batch = await driving
    assert batch.state is BatchState.EXPIRED
    assert batch.times[BatchState.FINALIZING] >= batch.expires_at
    assert (batch.completed, batch.failed) == (20, 300)
    answers = await read_lines(service, batch.output_file_id)
    assert {line["custom_id"] for line in answers} == {f"line {i}" for i in range(20)}
    errors = await read_lines(service, batch.error_file_id)
    assert {line["custom_id"] for line in errors} == {f"long {i}" for i in range(300)}
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert all(line["response"] is None for line in errors)
    async with Producer(model="letters", settings=settings) as producer:
        states = await producer.states([batch.request_id(number) for number in range(1, 321)])
    assert states[:20] == [State.COMPLETED] * 20
    submitted = [state for state in states[20:] if state is not None]
    assert set(submitted) == {State.CANCELLED}
    assert 0 < len(submitted) <= settings.batches.in_flight


async def expire_soon(service: BatchService, batch: Batch) -> None:
    """Let a batch's window end in a second."""
    while True:
        now = await service.batches.get(batch.id)
        soon = now.model_copy(update={"expires_at": int(time.time()) + 1})
        try:
            await service.batches.change(now, soon)
            return
        except BatchChanged:
            continue  # by its driver


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigurationError, match=f"batches.metrics_port: got {port};"),
            BatchMetrics().served("127.0.0.1", port),
        ):
            pass

"""Batches from their input to their output, driven by processes that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from batches.conftest import completion_lines
from durable_redis import free_port, start_durable_redis
from openai.types.responses import Response
from waiting import wait_until_async
from workers import WorkerFactory

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.batch_store import BatchChanged
from penstock.producer.batches.records import Batch, BatchState
from penstock.shared.keys import BatchKeys
from penstock.shared.local.children import spawn_bound
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import load_settings

Start = Callable[[], subprocess.Popen[bytes]]


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def start(service: BatchService, data: bytes, **options: Any) -> Batch:
    file = await service.files.upload(
        chunks(data), tenant="tests", filename="input.jsonl", expires_after_s=None
    )
    options.setdefault("endpoint", "/v1/completions")
    return await service.create(input_file_id=file.id, tenant="tests", **options)


async def ended(service: BatchService, batch: Batch) -> Batch:
    async def has_ended() -> bool:
        return (await service.batches.get(batch.id)).ended

    await wait_until_async(has_ended, "the batch has ended", 60)
    return await service.batches.get(batch.id)


async def read_lines(service: BatchService, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    file = await service.files.get(file_id)
    data = b"".join([chunk async for chunk in service.files.content(file)])
    return [json.loads(line) for line in data.splitlines()]


async def test_every_line_is_answered_once(
    letters: WorkerFactory, service: BatchService, drivers: Start
) -> None:
    drivers()
    batch = await ended(service, await start(service, completion_lines(600)))
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 600, 0)
    assert batch.usage.output_tokens == 600 * 8
    lines = await read_lines(service, batch.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"line {i}" for i in range(600))
    body = lines[0]["response"]["body"]
    assert lines[0]["response"]["status_code"] == 200
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 8
    assert batch.error_file_id is None


async def test_driver_killed_amid_a_batch_costs_no_line_and_repeats_none(
    letters: WorkerFactory, service: BatchService, drivers: Start
) -> None:
    first = drivers()
    batch = await start(service, completion_lines(2000, max_tokens=16))

    async def is_amid() -> bool:
        return 0 < (await service.batches.get(batch.id)).completed < 2000

    await wait_until_async(is_amid, "the batch is in progress", 60)
    first.kill()
    drivers(), drivers()
    batch = await ended(service, batch)
    assert (batch.state, batch.completed) == (BatchState.COMPLETED, 2000)
    lines = await read_lines(service, batch.output_file_id)
    names = [line["custom_id"] for line in lines]
    assert len(set(names)) == len(names) == 2000
    assert batch.usage.output_tokens == 2000 * 16  # each was counted once


async def test_a_batch_whose_input_is_deleted_hands_out_what_had_ended(
    letters: WorkerFactory, service: BatchService, drivers: Start
) -> None:
    first = drivers()
    batch = await start(service, completion_lines(2000, max_tokens=16))

    async def is_amid() -> bool:
        return 0 < (await service.batches.get(batch.id)).completed < 2000

    await wait_until_async(is_amid, "the batch is in progress", 60)
    first.kill()
    await service.files.delete(await service.files.get(batch.input_file_id))
    drivers()
    batch = await ended(service, batch)
    assert batch.state is BatchState.FAILED
    assert batch.errors[-1].code == "input_file_deleted"
    lines = await read_lines(service, batch.output_file_id)
    assert len(lines) == batch.completed > 0


async def test_redis_killed_amid_a_batch_loses_no_line_and_repeats_none(tmp_path: Path) -> None:
    """With an append-only file. The driver and the worker wait, and go on."""
    port = free_port()
    server = start_durable_redis(port, tmp_path)
    url = f"redis://127.0.0.1:{port}"
    storage = {"PENSTOCK_BATCHES__STORAGE": str(tmp_path / "files")}
    workers = WorkerFactory(url, tmp_path)
    with (tmp_path / "driver.log").open("wb") as log:
        driver = spawn_bound(
            [sys.executable, "-m", "penstock.producer.cli", "batches"],
            stdout=log, stderr=log, env={**os.environ, "REDIS_URL": url, **storage},
        )  # fmt: skip
    try:
        await asyncio.to_thread(
            workers.supervised, "letters", "--model", "synthetic", "--name", "letters"
        )
        settings = load_settings({"redis.url": url, "batches.storage": str(tmp_path / "files")})
        client = RetryingClient(url, outage_s=60)
        await client.connect(BatchKeys().active)
        service = BatchService(client, settings)
        batch = await start(service, completion_lines(600, max_tokens=16))
        for done in (0, 200):

            async def is_amid(done: int = done) -> bool:
                return done < (await service.batches.get(batch.id)).completed

            await wait_until_async(is_amid, "the batch is in progress", 60)
            server.kill()
            server.wait(10)
            server = await asyncio.to_thread(start_durable_redis, port, tmp_path)
        batch = await ended(service, batch)
        assert (batch.state, batch.completed) == (BatchState.COMPLETED, 600)
        names = [line["custom_id"] for line in await read_lines(service, batch.output_file_id)]
        assert len(set(names)) == len(names) == 600
        assert batch.usage.output_tokens == 600 * 16
        await service.aclose()
        await client.aclose()
        assert driver.poll() is None
        driver.terminate()
        assert await asyncio.to_thread(driver.wait, 20) == 0
        assert "Traceback" not in (tmp_path / "driver.log").read_text()
    finally:
        driver.kill()
        workers.close()
        server.kill()
        server.wait(10)


async def test_lines_may_name_the_responses_endpoint(
    letters: WorkerFactory, service: BatchService, drivers: Start
) -> None:
    drivers()
    data = b""
    for number in range(3):
        body = {"model": "letters", "input": f"Say {number}.", "max_output_tokens": 6}
        fields = {"custom_id": str(number), "method": "POST", "url": "/v1/responses"}
        data += json.dumps({**fields, "body": body}).encode() + b"\n"
    batch = await ended(service, await start(service, data, endpoint="/v1/responses"))
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 3, 0)
    for line in await read_lines(service, batch.output_file_id):
        response = Response.model_validate(line["response"]["body"])
        assert response.status in ("completed", "incomplete")
        assert len(response.output_text) > 0
        assert response.usage is not None
        assert response.usage.output_tokens <= 6


async def test_lines_that_fail_go_to_the_error_file(
    letters: WorkerFactory, service: BatchService, drivers: Start
) -> None:
    drivers()
    good = completion_lines(3)
    long = {"model": "letters", "prompt": [1] * 70_000, "max_tokens": 4}
    bad = {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": long}
    batch = await ended(service, await start(service, good + json.dumps(bad).encode()))
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 3, 1)
    [line] = await read_lines(service, batch.error_file_id)
    assert line["custom_id"] == "long"
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"


def line(**changes: Any) -> bytes:
    """A line that is right but for the changes; body's fields are given by ``body``."""
    body = {"model": "letters", "prompt": "x", **changes.pop("body", {})}
    fields = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps({**fields, **changes}).encode()


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (b'{"custom_id"', "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[" * 5000, "invalid_json_line"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint"),
        (line(custom_id="line 1"), "duplicate_custom_id"),
        (line(extra=1), "unknown_parameter"),
        (line(body={"model": "other"}), "mismatched_model"),
        (line(body={"stream": True}), "unsupported_parameter"),
        (line(body={"temperature": 99}), "invalid_value"),
    ],
)
async def test_malformed_line_is_named_and_nothing_is_computed(
    letters: WorkerFactory, service: BatchService, broken: bytes, code: str
) -> None:
    data = completion_lines(3) + broken + b"\n" + completion_lines(0)
    batch = await start(service, data)
    driver = service.driver()
    assert await driver.tick(batch.id, budget_s=30) is False
    batch = await service.batches.get(batch.id)
    assert batch.state is BatchState.FAILED
    assert [(error.line, error.code) for error in batch.errors] == [(4, code)]
    assert batch.next_line == 0


async def test_cancelled_batch_hands_out_what_has_ended(
    letters: WorkerFactory, service: BatchService, drivers: Start
) -> None:
    drivers()
    batch = await start(service, completion_lines(3000, max_tokens=64))

    async def is_amid() -> bool:
        return (await service.batches.get(batch.id)).completed > 0

    await wait_until_async(is_amid, "the batch is in progress", 60)
    await service.cancel(batch.id, "tests")
    batch = await ended(service, batch)
    assert batch.state is BatchState.CANCELLED
    assert 0 < batch.completed < 3000
    assert batch.completed + batch.failed == 3000
    assert len(await read_lines(service, batch.output_file_id)) == batch.completed
    errors = await read_lines(service, batch.error_file_id)
    assert {line["error"]["code"] for line in errors if line["error"]} == {"batch_cancelled"}


async def test_of_two_changes_of_one_version_one_is_refused(
    letters: WorkerFactory, service: BatchService
) -> None:
    batch = await start(service, completion_lines(1))
    changed = await service.batches.change(batch, batch.model_copy(update={"read_lines": 1}))
    with pytest.raises(BatchChanged):
        await service.batches.change(batch, batch)
    assert await service.batches.get(batch.id) == changed
    outcomes = await asyncio.gather(
        *(service.batches.change(changed, changed) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(outcome, Batch) for outcome in outcomes) == 1

"""Processes that die amid a batch cost no line, and no token twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from batches.conftest import completion_lines, ended, read_lines, start
from durable_redis import start_durable_redis
from waiting import wait_until_async
from workers import WorkerFactory

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.stores.records import Batch, BatchState
from penstock.shared.keys import BatchKeys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import load_settings

Start = Callable[[], subprocess.Popen[bytes]]


async def is_amid(service: BatchService, batch: Batch) -> bool:
    now = await service.batches.get(batch.id)
    assert not now.ended
    return now.completed > 0


async def test_driver_killed_amid_batches_costs_no_line_and_repeats_none(
    synthetic_worker: None, service: BatchService, drivers: Start
) -> None:
    """The input of one of them is deleted meanwhile: it hands out what had ended."""
    first = drivers()
    batches = [await start(service, completion_lines(600, max_tokens=16)) for _ in range(2)]

    async def are_amid() -> bool:
        return all([await is_amid(service, batch) for batch in batches])

    await wait_until_async(are_amid, "the batches are in progress", 60)
    first.kill()
    orphan = await service.batches.get(batches[1].id)
    await service.files.delete(await service.files.get(orphan.input_file_id))
    drivers(), drivers()
    whole, orphan = [await ended(service, batch) for batch in batches]
    assert (whole.state, whole.completed) == (BatchState.COMPLETED, 600)
    names = [line["custom_id"] for line in await read_lines(service, whole.output_file_id)]
    assert len(set(names)) == len(names) == 600
    assert whole.usage.output_tokens == 600 * 16  # each was counted once
    assert orphan.state is BatchState.FAILED
    assert orphan.errors[-1].code == "input_file_deleted"
    lines = await read_lines(service, orphan.output_file_id)
    assert len(lines) == orphan.completed > 0


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
        await wait_until_async(lambda: is_amid(service, batch), "the batch is in progress", 60)
        server.kill()
        server.wait(60)
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
        assert "Traceback" not in (said := (tmp_path / "driver.log").read_text()), said
    finally:
        driver.kill()
        workers.close()
        server.kill()
        server.wait(60)

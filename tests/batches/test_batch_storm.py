"""10,000 lines while arq's process, the worker, Redis and all of them are killed in turn."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batches.conftest import completion_lines, read_lines, start
from durable_redis import start_durable_redis
from workers import WorkerFactory

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.stores.records import Batch, BatchState
from penstock.shared.keys import BatchKeys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import load_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LINES = 10_000
TOKENS = 16
KILLS = ("driver", "redis", "worker", "driver", "redis", "machine", "driver", "worker", "driver")
"""Each happens at its tenth of the lines; a seed draws their order."""


class Machine:
    """Redis, a worker and a process that drives batches: killed and started again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port, self.folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}"
        self.steps = folder / "steps.jsonl"
        self.workers = WorkerFactory(self.url, folder)
        self.lives = 0
        self.redis = start_durable_redis(self.port, folder)
        self.start_worker()
        self.driver = self.start_driver()

    def start_worker(self) -> None:
        self.lives += 1
        self.worker = self.workers.command(
            f"worker-{self.lives}",
            *("--model", "synthetic", "--name", "letters", "--threads", "1"),
            *("--kv-memory", "32MiB", "--metrics-port", "0"),
            PENSTOCK_WORKER__STEP_LOG=str(self.steps),
        )

    def start_driver(self) -> subprocess.Popen[bytes]:
        storage = {"PENSTOCK_BATCHES__STORAGE": str(self.folder / "files")}
        with (self.folder / "driver.log").open("ab") as log:
            return spawn_bound(
                [sys.executable, "-m", "penstock.producer.cli", "batches"],
                stdout=log, stderr=log, env={**os.environ, "REDIS_URL": self.url, **storage},
            )  # fmt: skip

    def kill(self, what: str) -> None:
        """``kill -9``, and a new one at once."""
        victims = {"driver": [self.driver], "worker": [self.worker], "redis": [self.redis]}.get(
            what, [self.redis, self.worker, self.driver]
        )
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.wait(60)
        if self.redis in victims:
            self.redis = start_durable_redis(self.port, self.folder)
        if self.worker in victims:
            self.start_worker()
        if self.driver in victims:
            self.driver = self.start_driver()

    def computed(self) -> int:
        """Tokens that all workers have computed, prompts included."""
        lines = self.steps.read_text().splitlines()
        return sum(json.loads(line)["tokens"] for line in lines if line.endswith("}"))

    def close(self) -> None:
        self.driver.kill()
        self.driver.wait(60)
        self.workers.close()
        self.redis.kill()
        self.redis.wait(60)


async def run(folder: Path, kills: list[str]) -> tuple[int, Batch]:
    """A whole batch; the tokens that were computed for it, and its record."""
    machine = await asyncio.to_thread(Machine, folder)
    settings = load_settings({"redis.url": machine.url, "batches.storage": str(folder / "files")})
    client = RetryingClient(machine.url, outage_s=60)
    try:
        await client.connect(BatchKeys().active)
        service = BatchService(client, settings)
        batch = await start(service, completion_lines(LINES, max_tokens=TOKENS))
        due, left = LINES // (len(kills) + 1), list(kills)
        limit = time.monotonic() + 900
        while not batch.ended:
            assert time.monotonic() < limit, batch
            await asyncio.sleep(0.05)
            batch = await service.batches.get(batch.id)
            if left and batch.completed >= due * (len(kills) - len(left) + 1):
                await asyncio.to_thread(machine.kill, left.pop(0))
        assert not left
        names = [line["custom_id"] for line in await read_lines(service, batch.output_file_id)]
        assert len(set(names)) == len(names) == LINES
        await service.aclose()
        return machine.computed(), batch
    finally:
        await client.aclose()
        await asyncio.to_thread(machine.close)


@pytest.mark.parametrize("seed", [1])
async def test_no_line_is_lost_and_hardly_a_token_is_computed_twice(
    tmp_path: Path, seed: int
) -> None:
    """What is computed twice is the KV of sequences whose worker was killed under them."""
    kills = list(KILLS)
    random.Random(seed).shuffle(kills)
    calm, _ = await run(tmp_path / "calm", [])
    computed, batch = await run(tmp_path / "storm", kills)
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, LINES, 0)
    assert batch.usage.output_tokens == LINES * TOKENS
    print(f"\n{kills}: {computed} tokens computed, {calm} in calm, {computed / calm:.4f} times")
    assert computed <= 1.02 * calm

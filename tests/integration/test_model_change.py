"""Two checkpoints under one name: the second is refused, or streams keep to their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from redis.asyncio import Redis
from waiting import wait_until
from workers import WorkerFactory

from penstock.gpu_worker.demo_model import __path__ as demo_paths
from penstock.producer import Producer
from penstock.shared.keys import Keys

KEYS = Keys("demo")
LEASE_MS = 300


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """The demo model with other generation defaults."""
    folder = Path(shutil.copytree(Path(next(iter(demo_paths))) / "target", tmp_path / "other"))
    defaults = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**defaults, "top_k": 7}))
    return folder


async def test_a_worker_with_another_model_is_refused(
    workers: WorkerFactory, other_model: Path, tmp_path: Path
) -> None:
    workers.engine("first", worker__lease_ms=LEASE_MS, model__path="synthetic")
    refused = workers.command(
        "second", "--model", str(other_model), "--threads", "1", "--kv-memory", "32MiB",
        "--metrics-port", "off", PENSTOCK_QUEUE__MODEL="demo",
        PENSTOCK_WORKER__LEASE_MS=str(LEASE_MS),
    )  # fmt: skip
    assert refused.wait(60) == 2
    said = (tmp_path / "second.log").read_text()
    assert "serve another model" in said
    assert "worker.model_change = rolling" in said


async def test_in_a_rolling_change_streams_keep_to_their_model(
    workers: WorkerFactory, redis_url: str, redis_client: Redis
) -> None:
    old = workers.engine(
        "old", worker__lease_ms=LEASE_MS, model__path="synthetic", model__synthetic_step_ms=20
    )
    async with Producer(redis_url) as producer:
        ids = [f"r{number}" for number in range(3)]
        for request_id in ids:
            await producer.submit("abc", id=request_id, max_tokens=5000, ignore_eos=True)
        for request_id in ids:
            await anext(aiter(producer.stream(request_id)))
        new = workers.engine("new", worker__lease_ms=LEASE_MS, worker__model_change="rolling")
        assert old.terminate() == 0
        # Nobody serves their model any more. Ten leases later they end with the reason.
        for request_id in ids:
            end = (await producer.stream(request_id).collect()).end
            assert (end.reason, end.n > 0) == ("model_changed", True)
        fresh = (await producer.submit("The list type", max_tokens=3)).id
        assert len((await producer.stream(fresh).collect()).token_ids) == 3
        wait_until(lambda: new.metric("swept_requests_total") >= 3, "counted")
    assert len(await redis_client.zrange(KEYS.fingerprints, 0, -1)) == 1

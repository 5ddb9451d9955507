"""A worker that cannot go on ends, whatever else it is doing: else nobody starts it anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.rig import change, mutated
from workers import WorkerFactory

from penstock.producer import BlockingProducer
from penstock.shared.local.embedded import EmbeddedRedis

HANDLER = "        except (RedisError, PenstockError, OSError) as error:\n"
SWALLOWING = "        except asyncio.CancelledError:\n            return 0.0\n"
TASKS = ("gpu_worker/edge/guarded_task.py", HANDLER, SWALLOWING + HANDLER)
"""Tasks that swallow their cancellation, as redis-py may on Python 3.11."""


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


BUG = (
    "gpu_worker/edge/redis_loop.py",
    "        parts = self._parts(now)\n",
    "        raise KeyError('a bug')\n",
)

STEP = "        ends = time.perf_counter() + self._step_s\n"
EXIT = (
    "gpu_worker/engine_process/synthetic_model.py",
    STEP,
    "        __import__('os')._exit(2)\n" + STEP,
)


def code_of_a_hanging_worker(server: EmbeddedRedis, folder: Path) -> int:
    factory = WorkerFactory(server.url, folder)
    try:
        worker = factory.engine(
            "hangs",
            model__path="synthetic",
            model__synthetic_step_ms=60_000,
            worker__hang_timeout_s=0.2,
            worker__heartbeat_ms=50,
        )
        with BlockingProducer(server.url) as producer:
            producer.submit([1, 2, 3], max_tokens=10)
            return worker.process.wait(60)
    finally:
        factory.close()


def test_a_hung_engine_counts_as_dead(server: EmbeddedRedis, tmp_path: Path) -> None:
    """A step longer than the bound ends the process, so that the lease ends with it."""
    assert code_of_a_hanging_worker(server, tmp_path) == 70


def test_a_task_that_outlives_its_cancellation_holds_nothing_up(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", mutated(tmp_path, *TASKS))
    assert code_of_a_hanging_worker(server, tmp_path) == 70


def test_a_bug_at_the_edge_ends_it_all_the_same(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = mutated(tmp_path, *TASKS)
    change(site, *BUG)
    monkeypatch.setenv("PYTHONPATH", site)
    factory = WorkerFactory(server.url, tmp_path)
    try:
        # On a busy machine it may have ended before anybody sees that it was ready.
        assert factory.launch("buggy", model__path="synthetic").wait(60) == 70
    finally:
        factory.close()


def test_an_engine_that_ends_as_if_it_refused_is_broken(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the code of a refusal nobody would start it anew, or give back what it ran."""
    monkeypatch.setenv("PYTHONPATH", mutated(tmp_path, *EXIT))
    factory = WorkerFactory(server.url, tmp_path)
    try:
        worker = factory.engine("leaving", model__path="synthetic")
        with BlockingProducer(server.url) as producer:
            producer.submit([7])
        assert worker.process.wait(30) == 70
    finally:
        factory.close()

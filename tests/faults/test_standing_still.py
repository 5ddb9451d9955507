"""Each loop of a worker in turn stands still, ends or meets a bug: the worker is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.rig import mutated
from waiting import is_running, wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.producer import BlockingProducer
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol import Reason
from penstock.shared.synthetic import synthetic_tokens

FAST = {"worker__hang_timeout_s": 1, "redis__socket_timeout_s": 0.5, "worker__heartbeat_ms": 100}
SYNTHETIC = {"model__path": "synthetic"}


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def workers(server: EmbeddedRedis, tmp_path: Path) -> Iterator[WorkerFactory]:
    factory = WorkerFactory(server.url, tmp_path)
    yield factory
    factory.close()


TASKS = "gpu_worker/edge/guarded_task.py"
TURN = "        while not self._stopping:\n            self._heartbeat.beat()\n"
EXCHANGE = "        self._turns.beat()\n        now = time.monotonic()\n"
BEAT = "                beat()\n"


def stops(task: str, how: str) -> str:
    """A turn before which one task stops."""
    return f"{TURN}            if self._name == '{task}':\n                {how}\n"


STILL = {
    "bell": (TASKS, TURN, stops("bell", "return")),
    "ingress": (TASKS, TURN, stops("ingress", "await asyncio.Event().wait()")),
    "compactor": (TASKS, TURN, stops("compactor", "raise asyncio.CancelledError")),
    "the exchange with Redis": (
        "gpu_worker/edge/redis_loop.py",
        EXCHANGE,
        EXCHANGE + "        await asyncio.Event().wait()\n",
    ),
    "the renewal of the lease": (
        "gpu_worker/edge/redis_loop.py",
        '        if self._is_refused("claim", reply):\n',
        "        if True:\n",
    ),
    "the metrics server": (
        "gpu_worker/health.py",
        BEAT,
        BEAT + "                raise SystemExit\n",
    ),
    "the engine's step loop": (
        "gpu_worker/engine_process/worker.py",
        "        if not self._orders.wait(self._heartbeat_s) and",
        "        if not self._orders.wait(None) and",
    ),
}
"""A loop's name, and what makes it stand still: it ends, it hangs, or it raises past all guards."""


@pytest.mark.parametrize("loop", STILL, ids=lambda name: name.replace(" ", "-"))
def test_a_worker_with_a_loop_that_stands_still_ends(
    workers: WorkerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", mutated(tmp_path, *STILL[loop]))
    worker = workers.engine("still", **FAST, **SYNTHETIC)
    assert worker.process.wait(60) == 70
    # An exchange that stands still renews no lease, either: which of both is late first, is open.
    named = {loop} | ({"the renewal of the lease"} if loop == "the exchange with Redis" else set())
    log = worker.log.read_text()
    assert any(f"giving up: {name} has stood still" in log for name in named)


def replaced(worker: WorkerProcess, old: int) -> bool:
    """Whether another edge process serves in the place of one."""
    now = worker.children()
    return bool(now) and old not in now and not is_running(old)


@pytest.mark.parametrize("victim", ["edge", "idle engine"])
def test_a_supervisor_replaces_what_is_stopped(
    workers: WorkerFactory, server: EmbeddedRedis, victim: str
) -> None:
    """Stopped, not killed: it still exists, and only its heartbeat says that it does not work."""
    worker = workers.supervised(
        "stopped",
        PENSTOCK_WORKER__HANG_TIMEOUT_S="1",
        PENSTOCK_REDIS__SOCKET_TIMEOUT_S="0.5",
        PENSTOCK_MODEL__PATH="synthetic",
        PENSTOCK_QUEUE__MODEL="demo",
    )
    (edge,) = worker.children()
    with BlockingProducer(server.url) as producer:
        producer.submit([7], id="before", seed=1, max_tokens=5, ignore_eos=True)
        assert producer.stream("before").collect().token_ids == synthetic_tokens(1, [7], 5)
        pid = edge
        if victim == "idle engine":
            (pid,) = children(edge)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: replaced(worker, edge), "another edge runs", 60)
        producer.submit([7], id="after", seed=1, max_tokens=5, ignore_eos=True)
        assert producer.stream("after").collect().token_ids == synthetic_tokens(1, [7], 5)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


CLAIM = "            self._open(claim, Request.unpack(claim.payload))\n"
BAD_CLAIM = "            if b'poison' in claim.payload:\n                raise RecursionError\n"
REPLY = "        self._metrics.show_depth("
BAD_REPLY = "        raise RecursionError\n"


def isolated(worker: WorkerProcess, task: str) -> bool:
    lines = worker.get("/metrics")[1].splitlines()
    name = f'penstock_isolated_errors_total{{task="{task}"}} '
    return any(line.startswith(name) and float(line.removeprefix(name)) for line in lines)


def test_a_request_at_which_the_edge_raises_ends_and_its_neighbour_does_not_notice(
    workers: WorkerFactory, server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = mutated(tmp_path, "gpu_worker/edge/claims.py", CLAIM, BAD_CLAIM + CLAIM)
    monkeypatch.setenv("PYTHONPATH", site)
    worker = workers.engine("guarded", **SYNTHETIC, model__synthetic_step_ms=10)
    with BlockingProducer(server.url) as producer:
        producer.submit([7], id="neighbour", seed=1, max_tokens=60, ignore_eos=True)
        for number in range(10):
            producer.submit("poison", id=f"bad{number}")
        for number in range(10):
            bad = producer.stream(f"bad{number}").collect().end
            assert bad.reason is Reason.ENGINE_ERROR
            assert "RecursionError" in bad.message
        result = producer.stream("neighbour").collect()
    assert result.token_ids == synthetic_tokens(1, [7], 60)
    assert result.usage is not None
    assert result.usage.attempts == 1
    assert isolated(worker, "claims")
    assert worker.get("/healthz")[0] == 200


def test_a_reply_at_which_the_edge_raises_costs_no_other(
    workers: WorkerFactory, server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = mutated(tmp_path, "gpu_worker/edge/redis_loop.py", REPLY, BAD_REPLY + REPLY)
    monkeypatch.setenv("PYTHONPATH", site)
    worker = workers.engine("guarded", **SYNTHETIC)
    with BlockingProducer(server.url) as producer:
        producer.submit([7], id="r", seed=1, max_tokens=60, ignore_eos=True)
        assert producer.stream("r").collect().token_ids == synthetic_tokens(1, [7], 60)
    wait_until(lambda: isolated(worker, "exchange"), "it is counted")


def test_replies_that_always_raise_end_the_process(
    workers: WorkerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong, it is not one reply; and a loop that only catches errors serves nobody."""
    old = "                part.handle(reply)\n"
    site = mutated(tmp_path, "gpu_worker/edge/redis_loop.py", old, "                assert False\n")
    monkeypatch.setenv("PYTHONPATH", site)
    worker = workers.engine("broken", **SYNTHETIC, **FAST)
    assert worker.process.wait(60) == 70
    assert "8 exchanges in a row" in worker.log.read_text()

"""Each loop of a worker in turn stands still, ends or meets a bug: the worker is replaced."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.rig import mutated
from waiting import is_running, wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.producer import BlockingProducer
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.ports import free_port
from penstock.shared.protocol.states import Reason
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
        "gpu_worker/monitoring/health.py",
        BEAT,
        BEAT + "                raise SystemExit\n",
    ),
    "the engine's step loop": (
        "gpu_worker/engine_process/worker.py",
        "        if self._orders.wait(self._heartbeat_s):",
        "        if self._orders.wait(None):",
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


def test_a_stream_goes_on_elsewhere_when_its_engine_is_stopped(
    workers: WorkerFactory, server: EmbeddedRedis
) -> None:
    settings = {**FAST, **SYNTHETIC, "model__synthetic_step_ms": 10, "worker__lease_ms": 600}
    first = workers.engine("first", **settings)
    with BlockingProducer(server.url) as producer:
        producer.submit([7], id="long", seed=1, max_tokens=200, ignore_eos=True)
        next(iter(producer.stream("long")))
        (engine,) = children(first.process.pid)
        os.kill(engine, signal.SIGSTOP)
        second = workers.engine("second", **settings)
        tokens = producer.result("long", timeout=60).token_ids
        assert tokens == tuple(synthetic_tokens(1, [7], 200))
    assert first.process.wait(60) == 70
    assert "the engine's step loop has stood still" in first.log.read_text()
    assert second.metric("redeliveries_total") == 1


LOAD = "    if settings.model.path == SYNTHETIC:\n"
SLOW_LOAD = """\
    import time
    while not os.path.exists(os.environ["LOADED"]):
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_worker_that_loads_is_healthy_and_replaced_if_it_is_stopped_meanwhile(
    workers: WorkerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may take minutes. It is the edge whose heartbeat shows life meanwhile."""
    site = mutated(tmp_path, "gpu_worker/engine_process/main.py", LOAD, SLOW_LOAD + LOAD)
    monkeypatch.setenv("PYTHONPATH", site)
    port = free_port()
    loaded = tmp_path / "loaded"
    process = workers.command(
        "loading", "--model", "synthetic", "--metrics-port", str(port), LOADED=str(loaded),
        PENSTOCK_WORKER__HANG_TIMEOUT_S="1", PENSTOCK_QUEUE__MODEL="demo",
    )  # fmt: skip

    def is_loading() -> bool:
        return page(port, "readyz") == (503, "loading the model\n")

    wait_until(is_loading, "the worker loads", 60)
    began = time.monotonic()
    while time.monotonic() - began < 1.5:  # longer than a loop may stand still
        assert page(port, "healthz") == (200, "ok\n")
    (edge,) = children(process.pid)
    os.kill(edge, signal.SIGSTOP)
    wait_until(lambda: not is_running(edge), "the supervisor has ended it", 60)
    wait_until(is_loading, "another one loads", 60)
    loaded.touch()
    wait_until(lambda: page(port, "readyz")[0] == 200, "it serves", 60)


def page(port: int, name: str) -> tuple[int, str]:
    """Status and text of a page; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


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

"""A batcher as a user starts it: real Redis, a real worker with its supervisor, and faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from waiting import wait_until, wait_until_async
from workers import WorkerFactory, WorkerProcess

from penstock.producer import BlockingProducer, Producer
from penstock.shared.errors import IdConflict, RequestFailed
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.states import ModelKind, Reason, State

TESTS = str(Path(__file__).resolve().parents[1])
QUICK = {"PENSTOCK_WORKER__LEASE_MS": "500", "PENSTOCK_WORKER__HANG_TIMEOUT_S": "1"}


class Faulty(NamedTuple):
    """A worker and its log."""

    worker: WorkerProcess
    log: Path


def start(workers: WorkerFactory, name: str, *flags: str, **environment: str) -> WorkerProcess:
    """A worker that serves ``Doubler`` under a name."""
    arguments = ("--batcher", "doubler:Doubler", "--name", name, *flags)
    return workers.supervised(name, *arguments, PYTHONPATH=TESTS, **environment)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerFactory]:
    """Starts workers, each under a name of its own; all are gone after the test."""
    factory = WorkerFactory(redis_url, tmp_path)
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def shared(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server, with a worker that serves ``doubler``."""
    factory = WorkerFactory(redis_url, tmp_path_factory.mktemp("batcher"))
    start(factory, "doubler")
    yield redis_url
    factory.close()


@pytest.fixture(scope="module")
def faulty(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    """A worker that finds out soon when its processes hang or die, under the name ``faulty``."""
    folder = tmp_path_factory.mktemp("faulty")
    factory = WorkerFactory(redis_url, folder)
    yield Faulty(start(factory, "faulty", **QUICK), workers_log(folder, "faulty"))
    factory.close()


@pytest.fixture
async def producer(shared: str) -> AsyncIterator[Producer]:
    async with Producer(shared, model="doubler") as made:
        yield made


async def test_one_result_for_one_payload(producer: Producer) -> None:
    assert await producer.infer({"x": 21}, timeout=60) == {"y": 42, "batch": 1}
    card = await producer.model_card()
    assert card.kind is ModelKind.BATCH


def test_without_an_event_loop(shared: str) -> None:
    with BlockingProducer(shared, model="doubler") as made:
        assert made.infer({"x": 3}, timeout=60)["y"] == 6


async def test_requests_share_batches(producer: Producer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ids = [f"shares-{x}" for x in range(20)]
    await producer.submit(payload={"x": 0, "wait_for": str(gate)}, id=ids[0])
    for x, name in enumerate(ids[1:], 1):
        await producer.submit(payload={"x": x}, id=name)

    async def are_claimed() -> bool:
        return set(await producer.states(ids)) == {State.RUNNING}

    await wait_until_async(are_claimed, "claims")
    gate.touch()
    results = [(await producer.result(name, timeout=60)).value for name in ids]
    assert [result["y"] for result in results] == [2 * x for x in range(20)]
    assert max(result["batch"] for result in results) > 4


async def test_only_the_culprit_fails(producer: Producer) -> None:
    payloads: list[dict[str, Any]] = [{"x": x} for x in range(12)]
    payloads[3]["few"] = True
    payloads[5]["raise"] = "value"
    payloads[7]["return"] = "object"
    outcomes = await asyncio.gather(
        *(producer.infer(payload, timeout=60) for payload in payloads), return_exceptions=True
    )
    for index, outcome in enumerate(outcomes):
        if index in (3, 5, 7):
            assert isinstance(outcome, RequestFailed)
            expected = Reason.INVALID if index == 5 else Reason.ENGINE_ERROR
            assert outcome.reason is expected
        else:
            assert isinstance(outcome, dict)
            assert outcome["y"] == 2 * index


async def test_the_other_kind_of_work_is_refused(producer: Producer) -> None:
    submitted = await producer.submit("a prompt")
    result = await producer.result(submitted.id, timeout=60, check=False)
    assert result.reason is Reason.INVALID
    assert "payload" in result.end.message
    assert result.value is None


async def test_an_id_is_computed_once(producer: Producer) -> None:
    for _ in range(2):
        assert (await producer.infer({"x": 1}, id="once", timeout=60))["y"] == 2
    status = await producer.status("once")
    assert (status.state, status.n) == (State.COMPLETED, 1)
    with pytest.raises(IdConflict):
        await producer.submit(payload={"x": 2}, id="once")


async def test_a_late_reader_and_json(producer: Producer) -> None:
    submitted = await producer.submit(payload={"x": 4}, answer="json")
    for _ in range(2):
        result = await producer.result(submitted.id, timeout=60)
        assert result.value == {"y": 8, "batch": 1}
        assert result.usage is not None
        assert result.usage.prompt_tokens == 1


async def test_cancel_and_deadline_while_a_batch_runs(producer: Producer, tmp_path: Path) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    holds = asyncio.create_task(
        producer.infer({"x": 0, "key": "holds", "wait_for": str(gate), "log": str(log)})
    )
    await asyncio.to_thread(wait_until, log.exists, "a batch")
    cancelled = await producer.submit(payload={"x": 1, "log": str(log)})
    expires = await producer.submit(payload={"x": 2, "log": str(log)}, deadline_ms=50)
    await producer.cancel(cancelled.id)
    ends = [
        await producer.result(name.id, timeout=60, check=False) for name in (cancelled, expires)
    ]
    assert [end.reason for end in ends] == [Reason.CLIENT, Reason.DEADLINE]
    gate.touch()
    assert (await holds)["y"] == 0
    assert (await producer.infer({"x": 3}, timeout=60))["y"] == 6
    assert "2" not in [line.split()[1] for line in log.read_text().splitlines()]


@pytest.mark.slow  # five lives of a worker, one after the other
async def test_a_dead_engine_costs_no_request(redis_url: str, workers: WorkerFactory) -> None:
    """A payload that kills the process becomes a suspect, runs alone, and ends dead."""
    start(workers, "mortal", **QUICK)
    async with Producer(redis_url, model="mortal") as producer:
        bad = await producer.submit(payload={"x": 0, "die": True})
        good = [await producer.submit(payload={"x": x}) for x in range(1, 9)]
        results = [await producer.result(name.id, timeout=60) for name in good]
        assert [result.value["y"] for result in results] == [2 * x for x in range(1, 9)]
        end = await producer.result(bad.id, timeout=60, check=False)
        assert (end.state, end.reason) == (State.DEAD, Reason.POISON)


async def test_a_killed_worker_is_replaced(redis_url: str, faulty: Faulty) -> None:
    async with Producer(redis_url, model="faulty") as producer:
        assert (await producer.infer({"x": 1}, timeout=60))["y"] == 2
        (edge,) = faulty.worker.children()
        os.kill(edge, signal.SIGKILL)
        assert (await producer.infer({"x": 2}, timeout=60))["y"] == 4


async def test_a_hung_batch_is_replaced(redis_url: str, faulty: Faulty, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with Producer(redis_url, model="faulty") as producer:
        hung = asyncio.create_task(producer.infer({"x": 5, "wait_for": str(gate)}, id="hung"))
        other = asyncio.create_task(producer.infer({"x": 6}))
        stood_still = lambda: "stood still" in faulty.log.read_text()  # noqa: E731
        await asyncio.to_thread(wait_until, stood_still, "a hang", 30)
        gate.touch()
        assert (await asyncio.wait_for(hung, 60))["y"] == 10
        assert (await asyncio.wait_for(other, 60))["y"] == 12


async def test_a_drain_hands_over(redis_url: str, workers: WorkerFactory, tmp_path: Path) -> None:
    """What waits is served by the next worker; the batch that runs is not waited for."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    first = start(workers, "drains")
    async with Producer(redis_url, model="drains") as producer:
        held = asyncio.create_task(
            producer.infer({"x": 1, "wait_for": str(gate), "log": str(log), "key": 1})
        )
        await asyncio.to_thread(wait_until, log.exists, "a batch")
        waits = asyncio.create_task(producer.infer({"x": 2}, id="waits"))

        async def is_claimed() -> bool:
            return await producer.states(["waits"]) == [State.RUNNING]

        await wait_until_async(is_claimed, "a claim")
        workers.command(  # it loads while the first one drains
            "next", "--batcher", "doubler:AsyncDoubler", "--name", "drains", PYTHONPATH=TESTS,
            PENSTOCK_WORKER__MODEL_CHANGE="rolling", PENSTOCK_WORKER__METRICS_PORT="0",
        )  # fmt: skip
        assert await asyncio.to_thread(first.terminate) == 0
        gate.touch()
        assert [(await task)["y"] for task in (held, waits)] == [2, 4]


def workers_log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def test_a_target_that_is_none_ends_the_worker(workers: WorkerFactory, tmp_path: Path) -> None:
    process = workers.command("none", "--batcher", "doubler:Nothing", PYTHONPATH=TESTS)
    assert process.wait(60) == 2
    assert "no method infer" in workers_log(tmp_path, "none").read_text()


async def test_an_asynchronous_batcher_runs_several_batches(
    redis_url: str, workers: WorkerFactory
) -> None:
    """Each of them waits for two others."""
    worker = workers.supervised(
        "meeting", "--batcher", "doubler:Meeting", PYTHONPATH=TESTS,
        PENSTOCK_BATCHER__MAX_BATCH="1", PENSTOCK_BATCHER__MAX_CONCURRENT_BATCHES="3",
    )  # fmt: skip
    async with Producer(redis_url, model="Meeting") as producer:
        answers = await asyncio.gather(*(producer.infer(x, timeout=60) for x in range(6)))
        assert answers == list(range(6))
        alone = await producer.submit(payload=6)
        gauge = 'penstock_batcher_items{state="running"} 1.0'
        shows_it = lambda: gauge in worker.get("/metrics")[1]  # noqa: E731
        await asyncio.to_thread(wait_until, shows_it, "the gauge", 30)
        await producer.cancel(alone.id)


def test_a_blocking_batcher_runs_one_batch_at_a_time(
    workers: WorkerFactory, tmp_path: Path
) -> None:
    process = workers.command(
        "blocking", "--batcher", "doubler:Doubler", PYTHONPATH=TESTS,
        PENSTOCK_BATCHER__MAX_CONCURRENT_BATCHES="2",
    )  # fmt: skip
    assert process.wait(60) == 2
    assert "unless infer is async def" in workers_log(tmp_path, "blocking").read_text()

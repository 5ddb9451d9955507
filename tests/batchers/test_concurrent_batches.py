"""Several batches of an asynchronous model at once."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from waiting import wait_until

from penstock.gpu_worker.batchers.batch_queue import Batch, BatchQueue
from penstock.gpu_worker.batchers.batcher_class import serve_class
from penstock.gpu_worker.batchers.concurrent_batches import BatchHangs, ConcurrentBatches
from penstock.gpu_worker.batchers.window import Window
from penstock.gpu_worker.engine.requests.engine_request import Finish
from penstock.gpu_worker.engine.stats import BatcherStats
from penstock.gpu_worker.engine_process.batch_worker import BatchWorker
from penstock.gpu_worker.messages import Add, Broken, StepReport, unpacked_updates
from penstock.shared.protocol.payload import unpack_result
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import ModelKind, Reason


class Remote:
    """Waits for a word from outside, as for a remote service."""

    async def load(self) -> None:
        self.gates: dict[Any, asyncio.Event] = {}
        self.loop = asyncio.get_running_loop()
        self.began: list[list[Any]] = []

    async def infer(self, items: list[Any]) -> list[Any]:
        self.began.append(items)
        if "exit" in items:
            raise SystemExit("the device is lost")
        if "poison" in items:
            raise RuntimeError("out of luck")
        for item in items:
            await self.gates.setdefault(item, asyncio.Event()).wait()
        return [2 * item for item in items]

    def open(self, *items: Any) -> None:
        """Let these be answered."""
        for item in items:
            self.loop.call_soon_threadsafe(
                lambda item=item: self.gates.setdefault(item, asyncio.Event()).set()
            )


class Rig:
    """A loop in a thread of its own, with a batch for each item."""

    def __init__(self, most: int, hang_timeout_s: float = math.inf) -> None:
        self.model = Remote()
        self.served = serve_class(self.model, ModelKind.BATCH, summary="", fingerprint="")
        assert self.served.concurrent
        self.orders: list[Add | str] = []
        self.lock, self.woken = threading.Lock(), threading.Event()
        self.reports: list[StepReport] = []
        self.broken: list[Broken] = []
        window = Window(0.0)
        self.worker = BatchWorker(
            self.served, BatchQueue(1, None, window), window, self.report, self,
            heartbeat_s=0.01, max_concurrent=most, wake=self.woken.set,
            hang_timeout_s=hang_timeout_s,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()

    def give(self, *orders: Add | str) -> None:
        with self.lock:
            self.orders += orders
        self.woken.set()

    def poll(self) -> None:
        with self.lock:
            orders, self.orders = self.orders, []
        for order in orders:
            if isinstance(order, Add):
                self.worker.begin(order)
            elif order == "stop":
                self.worker.stop()
            else:
                self.worker.abort(order)

    def wait(self, timeout_s: float | None) -> bool:
        woken = self.woken.wait(timeout_s)
        self.woken.clear()
        return woken

    def report(self, message: StepReport | Broken) -> None:
        (self.broken if isinstance(message, Broken) else self.reports).append(message)  # type: ignore[arg-type]

    @property
    def ends(self) -> dict[str, Any]:
        found = [u for report in list(self.reports) for u in unpacked_updates(report.updates)]
        assert len({update.id for update in found}) == len(found)
        return {update.id: update for update in found}

    def end(self, items: Sequence[Any] = ()) -> None:
        """Stop the loop, and let what runs be answered."""
        self.give("stop")
        self.model.open(*items)
        self.thread.join(30)
        assert not self.thread.is_alive()
        wait_until(lambda: not batch_threads(), "the end of what hung", 60)
        self.served.close()


def batch_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("batch-")]


def add(payload: Any, **fields: Any) -> Add:
    request = Request.build(id=f"r{payload}", payload=payload)
    return Add(request.id, request, (), (), 0.0, math.inf, **fields)


def begun(rig: Rig, count: int) -> None:
    wait_until(lambda: len(rig.model.began) >= count, f"{count} batches", 60)


def test_batches_run_beside_each_other_and_the_next_waits_for_room() -> None:
    rig = Rig(3)
    rig.give(*(add(item) for item in range(5)))
    begun(rig, 3)
    seen = lambda: rig.reports and rig.reports[-1].batcher == BatcherStats(2, 3, 3, 0.0)  # noqa: E731
    wait_until(seen, "the gauges", 60)
    assert sorted(rig.model.began) == [[0], [1], [2]]
    rig.model.open(2)  # the last of them ends first
    begun(rig, 4)
    wait_until(lambda: "r2" in rig.ends, "its result", 60)
    assert rig.ends.keys() == {"r2"}
    assert rig.model.began[3:] == [[3]]
    rig.model.open(0, 1, 3)
    begun(rig, 5)
    rig.end([4])
    assert [unpack_result(rig.ends[f"r{item}"].finish.result) for item in range(5)] == [
        0,
        2,
        4,
        6,
        8,
    ]
    assert rig.broken == []


def test_one_that_fails_leaves_those_beside_it_alone() -> None:
    rig = Rig(2)
    rig.give(add(1), add("poison"), add(2))
    begun(rig, 3)
    wait_until(lambda: "rpoison" in rig.ends, "its failure", 60)
    assert rig.ends["rpoison"].finish.reason is Reason.ENGINE_ERROR
    rig.end([1, 2])
    assert {run for run, end in rig.ends.items() if end.finish.result} == {"r1", "r2"}


def test_the_order_to_stop_waits_for_what_runs_and_begins_nothing() -> None:
    rig = Rig(2)
    rig.give(add(1), add(2), add(3), add(4))
    begun(rig, 2)
    rig.give("r3")  # a cancel
    rig.end([1, 2, 4])
    assert rig.ends.keys() == {"r1", "r2"}
    assert sorted(rig.model.began) == [[1], [2]]


def test_a_suspect_shares_the_process_with_none() -> None:
    rig = Rig(3)
    rig.give(add(1))
    begun(rig, 1)
    rig.give(add(2, suspect=True))
    waits = lambda: rig.reports and rig.reports[-1].batcher.waiting == 1  # noqa: E731
    wait_until(waits, "a suspect that waits", 60)
    assert rig.model.began == [[1]]
    rig.model.open(1)
    begun(rig, 2)
    rig.give(add(3))
    wait_until(waits, "another that waits", 60)
    assert rig.model.began == [[1], [2]]
    rig.model.open(2)
    begun(rig, 3)
    rig.end([3])
    assert rig.ends.keys() == {"r1", "r2", "r3"}


def test_a_batch_that_hangs_beside_others_ends_the_loop() -> None:
    rig = Rig(2, hang_timeout_s=0.2)
    rig.give(add(1))
    rig.thread.join(30)
    assert not rig.thread.is_alive()
    assert "has run for over 0.2 s" in rig.broken[0].error
    rig.end([1])


def test_a_batch_that_fails_hangs_only_if_one_of_its_passes_does() -> None:
    now, late, passed, go = 0.0, threading.Event(), threading.Event(), threading.Event()

    def run(batch: Batch, on_pass: Callable[[], None]) -> list[Finish]:
        assert late.wait(60)
        on_pass()
        passed.set()
        assert go.wait(60)
        return []

    beside = ConcurrentBatches(run, 2, lambda: None, hang_timeout_s=30, clock=lambda: now)
    beside.start(Batch(()))
    now = 20.0
    late.set()
    assert passed.wait(60)
    now = 49.0
    beside.check_progress()
    now = 51.0
    with pytest.raises(BatchHangs):
        beside.check_progress()
    go.set()
    wait_until(lambda: bool(beside.take_ended()), "its end", 60)


def test_a_model_that_asks_to_be_replaced_ends_the_loop() -> None:
    rig = Rig(2)
    rig.give(add("exit"))
    rig.thread.join(30)
    assert rig.broken == [Broken("SystemExit('the device is lost')")]
    rig.end()

"""The loop of a model that answers at once, with orders of its own and a model that fails."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.gpu_worker.batchers.batch_queue import BatchQueue
from penstock.gpu_worker.batchers.batcher_class import ServedBatcher
from penstock.gpu_worker.batchers.window import Window
from penstock.gpu_worker.engine_process.batch_worker import BatchWorker
from penstock.gpu_worker.messages import Add, Broken, StepReport, unpacked_updates
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.payload import unpack_result
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import ModelKind, Reason


class Rig:
    """A loop that gets groups of orders, one a turn, and then the order to stop."""

    def __init__(
        self,
        *groups: Sequence[Add | str],
        clock: Callable[[], float] = time.monotonic,
        **model: Any,
    ) -> None:
        self.groups = [list(group) for group in groups]
        self.batches: list[list[Any]] = []
        self.reports_before: list[int] = []
        self.reports: list[StepReport] = []
        self.broken: list[Broken] = []
        served = ServedBatcher(self.infer, ModelKind.BATCH, "", "", **model)
        window = Window(0.0)
        queue = BatchQueue(4, served.max_cost, window)
        self.worker = BatchWorker(
            served, queue, window, self.report, self, heartbeat_s=0.01, clock=clock
        )
        self.worker.run()

    def poll(self) -> None:
        if not self.groups:
            self.worker.stop()
            return
        for order in self.groups.pop(0):
            if isinstance(order, Add):
                self.worker.begin(order)
            else:
                self.worker.abort(order)

    def wait(self, timeout_s: float | None) -> bool:
        return True

    def report(self, message: StepReport | Broken) -> None:
        if isinstance(message, Broken):
            self.broken.append(message)
        else:
            self.reports.append(message)

    def infer(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.reports_before.append(len(self.reports))
        if "poison" in items:
            raise RuntimeError("out of luck")
        if "exit" in items:
            raise SystemExit("the device is lost")
        return [
            InvalidRequest("input", item, "a number")
            if isinstance(item, str)
            else {"tokens": 3, "twice": 2 * item}
            for item in items
        ]

    @property
    def ends(self) -> dict[str, Any]:
        found = [u for report in self.reports for u in unpacked_updates(report.updates)]
        assert len({update.id for update in found}) == len(found)
        return {update.id: update for update in found}


def add(payload: Any, lane: str = "normal", **fields: Any) -> Add:
    request = Request.build(id=f"r{payload}", payload=payload, lane=lane)
    return Add(request.id, request, (), (), 0.0, fields.pop("deadline", math.inf), **fields)


def test_what_has_come_is_one_batch_with_the_most_urgent_first() -> None:
    orders = [add(1, "batch"), add(2), add(3, "critical"), add(4), add(5)]
    rig = Rig(orders, [], charged=lambda result: result["tokens"])
    assert rig.batches == [[3, 2, 4, 5], [1]]
    assert unpack_result(rig.ends["r3"].finish.result) == {"tokens": 3, "twice": 6}
    assert rig.ends["r3"].finish.reason is Reason.STOP
    assert {update.prompt_tokens for update in rig.ends.values()} == {3}
    (first, *_) = rig.reports
    (record,) = first.records
    assert (record.num_tokens, record.num_sequences) == (12, 4)
    assert {use.run for use in first.used} == {"r2", "r3", "r4", "r5"}


def test_one_that_raises_fails_alone() -> None:
    rig = Rig([add(1), add("poison"), add(2)])
    assert rig.ends["rpoison"].finish.reason is Reason.ENGINE_ERROR
    assert "out of luck" in rig.ends["rpoison"].finish.message
    assert [unpack_result(rig.ends[run].finish.result)["twice"] for run in ("r1", "r2")] == [2, 4]


def test_each_pass_of_a_batch_that_fails_shows_that_the_loop_turns() -> None:
    """Else the passes of a slow model would together count as a hang."""
    rig = Rig([add(1), add("poison"), add(2)], clock=itertools.count().__next__)
    assert len(rig.batches) > 3
    assert rig.reports_before == sorted(set(rig.reports_before))


def test_a_bad_item_is_invalid_and_an_aborted_or_expired_one_is_not_computed() -> None:
    rig = Rig([add("bad"), add(1), add(2), "r1", "unknown", add(7, deadline=1.0)])
    assert rig.batches == [["bad", 2]]
    assert rig.ends.keys() == {"rbad", "r2"}
    assert rig.ends["rbad"].finish.reason is Reason.INVALID


def test_a_suspect_is_alone() -> None:
    rig = Rig([add(1, suspect=True), add(2), add(3)], [], [])
    assert rig.batches == [[2, 3], [1]]


def test_the_order_to_stop_leaves_what_waits_to_others() -> None:
    rig = Rig()
    assert (rig.batches, rig.ends, rig.broken) == ([], {}, [])


@pytest.mark.parametrize("cost", [1.5, -1, None])
def test_a_cost_that_is_none_fails_its_request(cost: Any) -> None:
    rig = Rig([add(1)], cost=lambda item: cost)
    assert rig.ends["r1"].finish.reason is Reason.ENGINE_ERROR
    assert rig.batches == []


def test_a_key_that_cannot_be_one_fails_its_request() -> None:
    rig = Rig([add(1), add(2)], key=lambda item: [] if item == 1 else "a")
    assert rig.ends["r1"].finish.reason is Reason.ENGINE_ERROR
    assert rig.batches == [[2]]


def test_a_batcher_may_ask_to_be_replaced() -> None:
    rig = Rig([add("exit")])
    assert rig.broken == [Broken("SystemExit('the device is lost')")]
    assert rig.ends == {}

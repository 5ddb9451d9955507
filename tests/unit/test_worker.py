"""The worker's loop: what it obeys, what it tells, and when it gives up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from unit.poison import CONFIG, POISON, PoisonedRunner, make_engine, request
from unit.worker_loop import Heard, Quiet, running
from waiting import wait_until

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest, Finish
from penstock.gpu_worker.engine_process.synthetic_model import SyntheticRunner, build_synthetic
from penstock.gpu_worker.engine_process.worker import Worker
from penstock.gpu_worker.messages import Broken, StepReport, unpacked_updates
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.shared.protocol.states import Reason
from penstock.shared.settings import Settings


class Turns:
    """Lets every wait time out at once, and stops the worker after a number of waits."""

    def __init__(self, turns: int) -> None:
        self.left = turns
        self.worker: Worker | None = None

    def poll(self) -> None:
        """Nothing to read."""

    def wait(self, timeout_s: float | None) -> bool:
        del timeout_s
        self.left -= 1
        if self.left <= 0 and self.worker is not None:
            self.worker.stop()
        return False


def test_loop_serves_while_it_isolates_and_aborts() -> None:
    heard = Heard()
    worker = Worker(make_engine(), PoisonedRunner(ValueError("bad")), heard, Quiet())
    with running(worker):
        worker.add(request("good", (97,), max_tokens=20))
        worker.add(request("poisoned", (POISON,)))
        worker.add(request("aborted", (98,), max_tokens=200))
        worker.abort("aborted")
        wait_until(lambda: len(heard.ends) == 2, "both requests ended")
        assert heard.ends == {"good": Reason.LENGTH, "poisoned": Reason.ENGINE_ERROR}
        wait_until(lambda: heard.is_idle, "it is idle")
        assert heard.last is not None
        assert heard.last.stats is not None
        assert heard.last.stats.output_tokens >= 20
    assert worker.failure is None


def test_tokens_of_several_steps_leave_together_and_all_before_it_stops() -> None:
    heard: list[StepReport] = []

    def hear(message: StepReport | Broken) -> None:
        assert isinstance(message, StepReport)
        heard.append(message)

    steps = itertools.count()
    orders = StopsSoon(21)
    orders.worker = worker = Worker(
        make_engine(), SyntheticRunner(0.0), hear, orders,
        clock=lambda: next(steps) / 10_000, stream_interval_s=3600,
    )  # fmt: skip
    worker.add(request("long", (97,), max_tokens=200))
    worker.add(request("short", (98,), max_tokens=10))
    worker.run()
    assert worker.failure is None
    got: dict[str, list[int]] = {"long": [], "short": []}
    for message in heard:
        for update in unpacked_updates(message.updates):
            assert update.start == len(got[update.id])
            got[update.id] += update.token_ids
    assert [len(tokens) for tokens in got.values()] == [21, 10]
    # The first tokens, the end of the short one, and what was there when it stopped.
    assert [len(message.updates) for message in heard] == [2, 1, 1]
    assert sum(len(message.records) for message in heard) == 21


class StopsSoon(Quiet):
    """The order to stop comes between two steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.worker: Worker | None = None

    def poll(self) -> None:
        assert self.worker is not None
        if self.steps == 0:
            self.worker.stop()
        self.steps -= 1


def test_no_step_begins_after_the_order_to_stop() -> None:
    runner, orders = PoisonedRunner(ValueError("bad")), StopsSoon(2)
    orders.worker = worker = Worker(make_engine(), runner, Heard(), orders)
    worker.add(request("long", (97,), max_tokens=200))
    worker.run()
    assert runner.steps == 2


def test_broken_engine_is_told_of() -> None:
    heard = Heard()
    worker = Worker(make_engine(), SyntheticRunner(0.0), heard, Quiet())
    with running(worker):
        worker.add(request("twice", (97,), max_tokens=250))
        worker.add(request("twice", (97,)))  # a bug at the edge: the engine refuses to go on
        wait_until(lambda: heard.broken is not None, "the failure is told")
    assert "twice" in str(heard.broken)
    assert worker.failure is not None


class LostDevice(PoisonedRunner):
    """Computes nothing any more once it has met the poison, as after an illegal access.

    Args:
        says_so: when it is asked to recover.
        moves: what fails is the forward, and not the copies before it.
    """

    def __init__(self, *, says_so: bool = True, moves: bool = True) -> None:
        super().__init__(RuntimeError("an illegal memory access was encountered"))
        self.says_so, self.moves, self.lost = says_so, moves, False

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        self.lost |= any(POISON in span.sequence.token_ids for span in plan.spans)
        if not self.lost:
            return super().run(plan, meanwhile)
        self.steps += 1
        if self.moves:
            raise self.error
        count = len(plan.spans)
        failure = Finish(Reason.ENGINE_ERROR, str(self.error))
        return StepOutput(((),) * count, dict.fromkeys(range(count), failure), moved=False)

    def recover(self) -> None:
        if self.lost and self.says_so:
            raise self.error


def until_broken(runner: SyntheticRunner, *requests: EngineRequest) -> Heard:
    """Serve requests, all from the first step on, until the loop breaks."""
    heard = Heard()
    worker = Worker(make_engine(), runner, heard, Quiet())
    for one in requests:
        worker.add(one)
    with running(worker):
        wait_until(lambda: heard.broken is not None, "the failure is told")
    assert worker.failure is not None
    return heard


@pytest.mark.parametrize("moves", [True, False])
def test_a_lost_device_ends_the_worker_and_no_request(moves: bool) -> None:
    runner = LostDevice(moves=moves)
    heard = until_broken(runner, request("good", (97,)), request("poisoned", (POISON,)))
    assert "illegal memory access" in str(heard.broken)
    assert not heard.ends
    assert runner.steps == 1


def test_a_batch_that_fails_to_the_last_is_not_blamed_on_its_requests() -> None:
    """Whatever is wrong: that all eight are poisoned is the less likely."""
    runner = LostDevice(says_so=False)
    others = [request(f"r{i}", (97 + i,)) for i in range(7)]
    heard = until_broken(runner, request("poisoned", (POISON,)), *others)
    assert "8 requests in a row failed" in str(heard.broken)
    assert not heard.ends


def test_requests_that_fail_one_by_one_end_the_worker_at_the_eighth() -> None:
    runner, heard = PoisonedRunner(ValueError("bad")), Heard()
    worker = Worker(make_engine(), runner, heard, Quiet())
    with running(worker):
        for i in range(14):  # each with the one before
            if i == 7:
                worker.add(request("good", (97,)))
                wait_until(lambda: "good" in heard.ends, "it is computed")
            worker.add(request(f"r{i}", (POISON,)))
            wait_until(lambda last=f"r{i}": last in heard.ends, "it has failed")
        assert heard.broken is None
        worker.add(request("r14", (POISON,)))
        wait_until(lambda: heard.broken is not None, "the failure is told")
    assert "r14" not in heard.ends
    assert len(heard.ends) == 15


@pytest.mark.parametrize(
    ("error", "prompts", "options"),
    [
        (MemoryError(), [(POISON, i) for i in range(8)], {}),
        (ValueError("bad"), [(POISON,)], {"beam_width": 4, "temperature": 0.0}),
        (ValueError("bad"), [(POISON, i) for i in range(7)] + [(97,)], {}),
    ],
    ids=["no memory", "one request", "one is computed"],
)
def test_failures_that_are_the_requests_own(
    error: Exception, prompts: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    heard = Heard()
    worker = Worker(make_engine(), PoisonedRunner(error), heard, Quiet())
    for number, prompt in enumerate(prompts):
        one = request(str(number), prompt)
        worker.add(replace(one, options=replace(one.options, **options)))
    with running(worker):
        wait_until(lambda: len(heard.ends) == len(prompts), "all have ended")
    assert worker.failure is None


class DraftsFail(SyntheticRunner):
    """Says of every step that its draft model failed."""

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        return replace(super().run(plan, meanwhile), draft_failed=True)


def test_steps_whose_draft_model_failed_are_counted() -> None:
    metrics, heard = WorkerMetrics(), Heard()

    def hear(message: StepReport | Broken) -> None:
        heard(message)
        for record in message.records if isinstance(message, StepReport) else ():
            metrics.observe_step(record)

    worker = Worker(make_engine(), DraftsFail(0.0), hear, Quiet())
    with running(worker):
        worker.add(request("r", (97,), max_tokens=3))
        wait_until(lambda: "r" in heard.ends, "the request ended")
    value = metrics.registry.get_sample_value
    assert value("penstock_draft_failures_total") == value("penstock_step_seconds_count") == 3


def test_pools_are_shown_one_by_one() -> None:
    metrics, config = (
        WorkerMetrics(),
        replace(CONFIG, more_kv_cache_groups=(KVCacheGroup(8, window=32),)),
    )
    engine = Engine(config, build_synthetic(Settings()).new_text_stream)
    engine.add(request("r", tuple(range(1, 60))))
    assert engine.schedule() is not None
    metrics.show_engine(engine.stats())

    def shown(name: str, window: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"penstock_kv_pool_blocks_{name}", {"window": window}
        )

    assert [shown("total", "full"), shown("total", "32")] == [64, 8]
    assert [shown("used", "full"), shown("used", "32")] == [4, 4]
    assert [shown("cached", "full"), shown("cached", "32")] == [0, 0]
    engine.abort("r")
    metrics.show_engine(engine.stats())
    assert [shown("used", "full"), shown("used", "32")] == [0, 0]


def quiet_calls(orders: Turns, *, heartbeat_s: float = 0.5) -> list[int]:
    """Run a worker until its orders stop it; how many waits were left at each ``when_quiet``."""
    calls: list[int] = []
    worker = Worker(
        make_engine(), PoisonedRunner(ValueError("bad")), Heard(), orders,
        heartbeat_s=heartbeat_s, when_quiet=lambda: calls.append(orders.left),
    )  # fmt: skip
    orders.worker = worker
    worker.run()
    assert worker.failure is None
    return calls


def test_it_is_told_once_that_two_seconds_were_quiet() -> None:
    assert quiet_calls(Turns(10)) == [6]  # the fourth turn of half a second
    assert quiet_calls(Turns(20), heartbeat_s=0.25) == [12]
    assert quiet_calls(Turns(3)) == []


def test_work_begins_the_quiet_time_anew() -> None:
    class Interrupted(Turns):
        def wait(self, timeout_s: float | None) -> bool:
            super().wait(timeout_s)
            if self.left != 7 or self.worker is None:
                return False
            self.worker.add(request("late", (97,), max_tokens=2))
            return True

    assert quiet_calls(Interrupted(11)) == [3]

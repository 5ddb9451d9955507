"""The worker's loop where it plans steps ahead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.poison import make_engine, request
from unit.worker_loop import Heard, Quiet, running
from waiting import wait_until

from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import Update
from penstock.gpu_worker.engine_process.synthetic_model import SyntheticRunner
from penstock.gpu_worker.engine_process.worker import Worker
from penstock.gpu_worker.messages import Broken, StepReport, unpacked_updates
from penstock.shared.synthetic import synthetic_tokens


class FailsAhead(SyntheticRunner):
    """Its forward raises in every third step that was planned ahead, before or after the rest."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.ahead = self.failed = 0

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        if plan.token_ids:
            self.ahead += 1
            if self.ahead % 3 == 0:
                self.failed += 1
                if self.failed % 2 and meanwhile is not None:
                    meanwhile()
                raise ValueError("bad")
        return super().run(plan, meanwhile)


def served(runner: SyntheticRunner, *, overlap: bool) -> dict[str, tuple[list[int], str]]:
    """Tokens and text of requests that come and end at different times."""
    heard: dict[str, tuple[list[int], str]] = {}
    ended: set[str] = set()

    def hear(message: StepReport | Broken) -> None:
        assert isinstance(message, StepReport)
        for update in unpacked_updates(message.updates):
            ids, text = heard.get(update.id, ([], ""))
            assert update.start == len(ids)
            heard[update.id] = ([*ids, *update.token_ids], text + update.text)
            if update.finish is not None:
                ended.add(update.id)

    worker = Worker(make_engine(), runner, hear, Quiet(), overlap=overlap)
    with running(worker):
        for number in range(12):
            one = request(f"r{number}", (97 + number,), max_tokens=10 + 5 * number)
            stop = [chr(synthetic_tokens(1, one.prompt_ids, 8)[-1])] if number % 3 == 0 else []
            worker.add(replace(one, options=replace(one.options, stop=tuple(stop))))
            wait_until(lambda number=number: f"r{number}" in heard, "it runs")
        wait_until(lambda: len(ended) == 12, "all have ended")
    assert worker.failure is None
    return heard


class CannotPrepare(SyntheticRunner):
    """It packs a step when it runs it, and no earlier."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.failed = 0

    def prepare(self, plan: Plan) -> None:
        assert not plan.token_ids
        self.failed += 1
        raise MemoryError("no memory")


def test_a_step_that_cannot_be_prepared_runs_all_the_same() -> None:
    runner = CannotPrepare()
    assert served(runner, overlap=True) == served(SyntheticRunner(0.0), overlap=False)
    assert runner.failed == 1  # it is not asked again


@pytest.mark.parametrize("runner", [SyntheticRunner(0.0), FailsAhead()])
def test_steps_planned_ahead_give_the_same(runner: SyntheticRunner) -> None:
    assert served(runner, overlap=True) == served(SyntheticRunner(0.0), overlap=False)
    assert not isinstance(runner, FailsAhead) or runner.failed > 3


def test_what_collecting_raises_meanwhile_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a bug of the engine, and not the step's fault."""
    heard, engine = Heard(), make_engine()
    worker = Worker(engine, SyntheticRunner(0.0), heard, Quiet(), overlap=True)
    collect, calls = engine.collect, itertools.count()

    def fail_later(plan: Plan, output: StepOutput) -> list[Update]:
        updates = collect(plan, output)
        if next(calls) == 5:
            raise KeyError("a bug")
        return updates

    monkeypatch.setattr(engine, "collect", fail_later)
    with running(worker):
        worker.add(request("r", (97,), max_tokens=200))
        wait_until(lambda: heard.broken is not None, "the failure is told")
    assert worker.failure is not None
    assert "a bug" in str(heard.broken)
    assert not heard.ends


class AlwaysFailsAhead(FailsAhead):
    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        self.ahead = 2 * bool(plan.token_ids)
        return super().run(plan, meanwhile)


def test_steps_that_fail_only_if_planned_ahead_are_not_planned_ahead_for_ever() -> None:
    runner = AlwaysFailsAhead()
    assert served(runner, overlap=True) == served(SyntheticRunner(0.0), overlap=False)
    assert runner.failed == 3


class ComesLater(Quiet):
    """A second request is ordered while the first one runs."""

    def __init__(self) -> None:
        self.polls = 0
        self.worker: Worker | None = None

    def poll(self) -> None:
        self.polls += 1
        if self.polls == 6:
            assert self.worker is not None
            self.worker.add(request("second", (98,), max_tokens=5))


@pytest.mark.parametrize("overlap", [False, True])
def test_what_has_just_come_is_not_reported_as_waiting(overlap: bool) -> None:
    """The edge would claim nothing more until the next report."""
    waiting: list[object] = []
    heard, orders = Heard(), ComesLater()

    def hear(message: StepReport | Broken) -> None:
        heard(message)
        assert isinstance(message, StepReport)
        waiting.append(message.load.waiting)

    worker = Worker(make_engine(), SyntheticRunner(0.0), hear, orders, overlap=overlap)
    orders.worker = worker
    worker.add(request("first", (97,), max_tokens=40))
    with running(worker):
        wait_until(lambda: len(heard.ends) == 2, "both have ended")
    assert len(waiting) > 5
    assert not any(waiting)

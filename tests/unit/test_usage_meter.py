"""The time of steps is shared out whole, by what each run had computed."""

from __future__ import annotations

import pytest

from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan, Span
from penstock.gpu_worker.engine.requests.engine_request import Finish, Update
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine_process.usage_meter import UsageMeter
from penstock.gpu_worker.messages import RunUsage
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason


def sequence(run: str) -> Sequence:
    return Sequence(
        id=run, prompt_ids=(1, 2, 3), options=SamplingOptions(), lane=Lane.NORMAL,
        tenant="default", seed=0, arrival=0.0, deadline=float("inf"),
    )  # fmt: skip


def update(run: str, *, ends: bool = False) -> Update:
    return Update(run, 0, (1,), "", Finish(Reason.LENGTH) if ends else None, 3, 0)


A, B = sequence("a"), sequence("b")


def test_time_is_shared_by_tokens_and_told_at_the_end() -> None:
    meter = UsageMeter(every_s=1e9)
    meter.report((), now=0.0)
    meter.add(Plan((Span(A, 0, 3, True), Span(B, 3, 1, True))), StepOutput(()), 0.004)
    meter.add(Plan((Span(A, 3, 1, True), Span(B, 4, 1, True))), StepOutput(()), 0.002)
    assert meter.report([update("a")], now=1.0) == ()
    assert meter.report([update("a", ends=True)], now=2.0) == (RunUsage("a", 4000, 0),)
    assert meter.report([update("a", ends=True)], now=3.0) == ()
    assert meter.report([update("b", ends=True)], now=4.0) == (RunUsage("b", 2000, 0),)


def test_drafts_count_as_verified() -> None:
    meter = UsageMeter(every_s=0.0)
    spans = (Span(A, 3, 1, True, (5, 6), 2), Span(B, 3, 1, True, (), 3))
    meter.add(Plan(spans), StepOutput((), drafted={B: 1}), 0.007)
    assert meter.report((), now=0.0) == (RunUsage("a", 3000, 2), RunUsage("b", 4000, 1))


def test_what_runs_is_told_now_and_then_and_what_was_aborted_never() -> None:
    meter = UsageMeter(every_s=1.0)
    meter.report((), now=0.0)
    meter.add(Plan((Span(A, 0, 1, True), Span(B, 0, 1, True))), StepOutput(()), 0.002)
    assert meter.report([update("a")], now=0.9) == ()
    meter.forget("b")
    assert meter.report([update("a")], now=1.0) == (RunUsage("a", 1000, 0),)
    assert meter.report([update("a")], now=1.9) == ()


@pytest.mark.parametrize("refusal", [True, False])
def test_a_run_that_was_never_computed_has_used_nothing(refusal: bool) -> None:
    meter = UsageMeter(every_s=0.0)
    assert meter.report([update("a", ends=refusal)], now=5.0) == ()

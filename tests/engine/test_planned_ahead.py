"""Which steps are planned before the one before them is collected."""

from __future__ import annotations

from itertools import repeat

import pytest
from engine.driving import engine
from engine.fakes import EOS, request

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.states import Lane


def in_flight(eng: Engine, *, token_id: int = 3) -> tuple[Plan, StepOutput]:
    """A step that is computed and not collected: each sequence of the engine samples a token."""
    plan = eng.schedule()
    assert plan is not None
    assert all(span.samples for span in plan.spans)
    return plan, StepOutput(tuple(repeat((token_id,), len(plan.spans))))


def test_a_prepared_plan_is_the_one_that_runs() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=9))
    plan, output = in_flight(eng)
    prepared = eng.prepare_ahead()
    assert prepared is not None
    ahead = eng.schedule_ahead(output)
    assert ahead is not None
    assert ahead.spans is prepared.spans
    assert ahead.token_ids == (3,)
    eng.collect(plan, output)
    eng.collect(ahead, output)
    eng.check_integrity()


def test_a_token_that_ends_an_output_ends_the_plan() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=9, ignore_eos=False))
    _, output = in_flight(eng, token_id=EOS)
    assert eng.prepare_ahead() is not None
    assert eng.schedule_ahead(output) is None


def test_the_last_token_ends_the_plan_before_it_is_known() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=1))
    in_flight(eng)
    assert eng.prepare_ahead() is None


def test_what_comes_or_goes_outdates_a_prepared_plan() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=9))
    eng.add(request("b", max_tokens=9))
    plan, output = in_flight(eng)
    assert eng.prepare_ahead() is not None
    eng.abort("b")
    assert eng.schedule_ahead(output) is None
    eng.collect(plan, output)
    plan, output = in_flight(eng)
    assert eng.prepare_ahead() is not None
    eng.add(request("c", max_tokens=9))
    assert eng.schedule_ahead(output) is None
    eng.collect(plan, output)
    eng.check_integrity()


@pytest.mark.parametrize("places", [2, 3])
def test_others_may_wait_only_where_no_place_is_free(places: int) -> None:
    """Else the step after this one admits what waits, and is another one."""
    eng = engine(max_sequences=places)
    for name in "ab":
        eng.add(request(name, max_tokens=9))
    in_flight(eng)
    eng.add(request("late", max_tokens=9))
    assert (eng.prepare_ahead() is not None) is (places == 2)


@pytest.mark.parametrize(
    ("lane", "is_ahead"), [(Lane.BATCH, True), (Lane.NORMAL, True), (Lane.CRITICAL, False)]
)
def test_what_may_displace_a_running_sequence_is_not_kept_waiting(
    lane: Lane, is_ahead: bool
) -> None:
    eng = engine(max_sequences=1)
    eng.add(request("a", max_tokens=9))
    _, output = in_flight(eng)
    eng.add(request("late", lane=lane, max_tokens=9))
    assert (eng.schedule_ahead(output) is not None) is is_ahead


def test_no_plan_in_flight() -> None:
    with pytest.raises(IntegrityError, match="0 plans in flight"):
        engine().prepare_ahead()

"""A slow mask delays its own sequence and no other."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from model.engine_run import Bench
from model.structured.test_constraints import FORMS, PLAIN, alone, ended
from waiting import wait_until

from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.structured.constraint_state import ConstraintFollower
from penstock.gpu_worker.model.structured.mask_maker import MaskMaker
from penstock.shared.protocol.states import Reason

Loaded = Callable[[str], LoadedModel]


@pytest.fixture
def tiny(loaded: Loaded) -> LoadedModel:
    return loaded("llama")


class Gated:
    """A constraint state that makes no mask before its gate is open."""

    def __init__(self, state: Any, gate: threading.Event, limit_s: float = 60.0) -> None:
        self.field, self.masks = state.field, state.masks
        self._state, self._gate, self._limit_s = state, gate, limit_s

    def fill(self, token_ids: Any, drafts: Any = ()) -> None:
        self._gate.wait(self._limit_s)
        self._state.fill(token_ids, drafts)


def gated(gate: threading.Event, limit_s: float = 60.0) -> Callable[[Any], Any]:
    def wrap(follower: Any) -> Any:
        follower.state = Gated(follower.state, gate, limit_s)
        return follower

    return wrap


def test_a_slow_constraint_puts_off_its_own_sequence_and_no_other(tiny: LoadedModel) -> None:
    gate = threading.Event()
    expected = [alone(tiny, seed, options) for seed, options in enumerate([*PLAIN, FORMS[0]])]
    slow_alone = alone(tiny, 9, FORMS[1])
    bench = Bench(tiny)
    bench.add("slow", [5, 6, 16], seed=9, wrap=gated(gate), **FORMS[1])
    for seed, options in enumerate([*PLAIN, FORMS[0]]):
        bench.add(str(seed), [5, 6, 7 + seed], seed=seed, **options)
    others = [bench.answers[str(seed)] for seed in range(5)]
    plain = others[: len(PLAIN)]
    while any(answer.finish is None for answer in plain):
        assert bench.step()
    # One token per step, as if the slow one were not there.
    assert bench.steps <= max(len(answer.token_ids) for answer in plain) + 1
    assert bench.deferrals >= bench.steps
    # On a slow machine the other constrained one waits for masks of its own.
    while any(answer.finish is None for answer in others):
        assert bench.step()
    assert [answer.token_ids for answer in others] == expected
    assert bench.answers["slow"].token_ids == []
    gate.set()
    assert bench.run()["slow"].token_ids == slow_alone


def test_a_step_waits_no_longer_than_its_budget(tiny: LoadedModel) -> None:
    """The slow one gets no mask before the other has ended; that waits for it 5 ms, and once."""
    masks, gate = MaskMaker(wait_s=0.005, limit_s=60.0), threading.Event()
    waits: list[float] = []
    join = masks.join

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return join(*args, **options)
        finally:
            waits.append(time.perf_counter() - begin)

    masks.join = timed  # type: ignore[method-assign]
    bench = Bench(tiny, masks)
    bench.add("slow", [5, 6], wrap=gated(gate, 30.0), regex="[ab]{90}")
    bench.add("other", [5, 6], max_tokens=60, ignore_eos=True)
    while bench.answers["other"].finish is None:
        bench.step()
    assert bench.deferrals > 40
    assert max(waits) < 15  # half of a mask: the machine may be busy, but nobody waits for it
    assert statistics.median(waits) < 0.004  # in most steps nothing is waited for
    gate.set()
    masks.close()


def test_alone_it_is_waited_for_without_spinning(tiny: LoadedModel) -> None:
    bench = Bench(tiny)
    bench.add("slow", [5, 6], wrap=gated(threading.Event(), 0.5), regex="a")
    bench.run()
    assert ended(bench.answers["slow"]) is Reason.STOP
    assert 2 <= bench.steps <= 2 * (0.5 / 0.05 + 2)


def test_a_mask_that_never_comes_ends_its_request(tiny: LoadedModel) -> None:
    now, gate = [0.0], threading.Event()
    masks = MaskMaker(limit_s=1.0, clock=lambda: now[0])
    bench = Bench(tiny, masks)
    bench.add("stuck", [5, 6], wrap=gated(gate), regex="a")
    bench.add("other", [5, 6, 8], seed=1, **FORMS[1])
    while bench.answers["other"].finish is None:
        bench.step()
    now[0] = 1.5
    answers = bench.run()
    assert ended(answers["stuck"]) is Reason.INVALID
    assert answers["stuck"].finish.message.startswith("regex: what may follow was not known after")
    assert answers["other"].token_ids == alone(tiny, 1, FORMS[1])
    gate.set()
    masks.close()


def test_a_mask_is_not_late_while_others_take_the_threads() -> None:
    """Its time runs from when a thread has taken it: here the only one has another to make."""
    now, gate, begun = [0.0], threading.Event(), threading.Event()

    def sequence(fill: Callable[..., object]) -> Any:
        state = SimpleNamespace(field="regex", fill=fill, masks=lambda count: [])
        return SimpleNamespace(
            token_ids=[1], num_prompt_tokens=1, constraint=ConstraintFollower(state)
        )  # type: ignore[arg-type]

    def fill_slowly(*args: object) -> None:
        begun.set()
        gate.wait(30)

    masks = MaskMaker(num_threads=1, limit_s=1.0, clock=lambda: now[0])
    slow, quick = sequence(fill_slowly), sequence(lambda *args: None)
    asked = masks.begin([slow, quick])
    assert begun.wait(60)
    now[0] = 1.5
    found = masks.join(asked, others=True)
    assert found.failures.keys() == {0}
    assert found.deferred == {1}
    gate.set()

    def quick_has_its_mask() -> bool:
        found = masks.join(masks.begin([quick]), others=True)
        assert not found.failures
        return not found.deferred

    wait_until(quick_has_its_mask, "it is its turn")
    masks.close()


def test_a_matcher_that_raises_fails_alone(tiny: LoadedModel) -> None:
    def broken(follower: Any) -> Any:
        follower.state.fill = None
        return follower

    bench = Bench(tiny)
    bench.add("broken", [5, 6], wrap=broken, regex="a")
    bench.add("other", [5, 6, 8], seed=1, **FORMS[1])
    answers = bench.run()
    assert ended(answers["broken"]) is Reason.ENGINE_ERROR
    assert answers["other"].token_ids == alone(tiny, 1, FORMS[1])


def test_who_asks_for_no_form_starts_no_threads(tiny: LoadedModel) -> None:
    before = threading.active_count()
    bench = Bench(tiny)
    bench.add("a", [5], max_tokens=3)
    bench.run()
    assert threading.active_count() == before

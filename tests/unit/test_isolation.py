"""A step that raises costs its culprit and nobody else."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

import pytest
from unit.poison import POISON, PoisonedRunner, make_engine, request

from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine_process.isolation import run_isolated
from penstock.gpu_worker.engine_process.synthetic_model import SyntheticRunner
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason
from penstock.shared.synthetic import synthetic_tokens


@pytest.mark.parametrize("poisoned", [{0}, {3}, {6}, {0, 6}, {2, 3}, set(range(7))])
def test_only_the_culprits_fail(poisoned: set[int]) -> None:
    engine = make_engine()
    for i in range(7):
        engine.add(request(f"r{i}", (POISON,) if i in poisoned else (97 + i, 98)))
    plan = engine.schedule()
    assert plan is not None
    output = run_isolated(PoisonedRunner(ValueError("bad data\nsecond line")), plan)
    updates = {update.id: update for update in engine.collect(plan, output)}
    engine.check_integrity()
    for i in range(7):
        update = updates[f"r{i}"]
        if i in poisoned:
            assert update.finish is not None
            assert update.finish.reason is Reason.ENGINE_ERROR
            assert update.finish.message == "ValueError: bad data"
        else:
            assert update.finish is None
            assert update.token_ids == synthetic_tokens(1, (97 + i, 98), 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), Reason.OUT_OF_MEMORY),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "out_of_memory",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate"), Reason.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (RuntimeError("shape mismatch"), Reason.ENGINE_ERROR),
    ],
)
def test_reason_tells_memory_from_other_errors(error: Exception, reason: str) -> None:
    engine = make_engine()
    engine.add(request("r", (POISON,)))
    plan = engine.schedule()
    assert plan is not None
    assert run_isolated(PoisonedRunner(error), plan).failures[0].reason == reason


class Tensor:
    """Large, and gone when nobody holds it."""


class Full(SyntheticRunner):
    """Has no memory for any step, and sees how many forwards before it still hold theirs."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.made: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def run(self, plan: Plan) -> StepOutput:
        self._look()
        activations = Tensor()
        self.made.append(weakref.ref(activations))
        raise MemoryError("out of memory")

    def recover(self) -> None:
        self._look()

    def _look(self) -> None:
        self.alive.append(sum(made() is not None for made in self.made))


def test_a_failed_step_holds_no_memory_while_its_halves_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest keeps what is logged, with all that its tracebacks hold.
    monkeypatch.setattr(logging.getLogger("penstock.worker"), "disabled", True)
    engine, runner = make_engine(), Full()
    for i in range(8):
        engine.add(request(f"r{i}", (97 + i,)))
    plan = engine.schedule()
    assert plan is not None
    assert len(run_isolated(runner, plan).failures) == 8
    assert runner.alive == [0] * 2 * 15  # in each forward, and when memory is given back after it


class Small(SyntheticRunner):
    """Has memory for steps of some tokens, whose context is not too long.

    Args:
        most: tokens of a step.
        longest: positions.
    """

    def __init__(self, most: int, longest: int = 256) -> None:
        super().__init__(0.0)
        self.most, self.longest = most, longest
        self.tried: list[list[tuple[int, int]]] = []

    def run(self, plan: Plan) -> StepOutput:
        spans = [(span.start, span.start + span.num_tokens) for span in plan.spans]
        self.tried.append(spans)
        if plan.num_tokens > self.most or max(stop for _, stop in spans) > self.longest:
            raise MemoryError("out of memory")
        return super().run(plan)


def test_a_chunk_that_gets_no_memory_is_run_in_shorter_ones() -> None:
    """Each reads what the one before has written, and only the last one samples."""
    engine, runner, prompt = make_engine(), Small(30), tuple(range(100, 161))
    engine.add(replace(request("r", prompt), options=SamplingOptions(prompt_logprobs=1)))
    engine.add(request("short", (97, 98)))
    plan = engine.schedule()
    assert plan is not None
    assert [span.num_tokens for span in plan.spans] == [61, 2]
    output = run_isolated(runner, plan)
    assert runner.tried == [
        [(0, 61), (0, 2)], [(0, 61)], [(0, 30)], [(30, 61)], [(30, 45)], [(45, 61)], [(0, 2)],
    ]  # fmt: skip
    expected = SyntheticRunner(0.0).run(plan)
    assert output.token_ids == expected.token_ids
    sequence = plan.spans[0].sequence
    assert output.prompt_logprobs[sequence] == expected.prompt_logprobs[sequence]
    assert len(output.prompt_logprobs[sequence]) == 60
    assert not output.failures


def test_a_chunk_is_given_up_where_its_first_tokens_get_no_memory() -> None:
    engine, runner = make_engine(), Small(64, longest=50)
    engine.add(request("r", tuple(range(100, 164))))
    plan = engine.schedule()
    assert plan is not None
    failures = run_isolated(runner, plan).failures
    assert {index: finish.reason for index, finish in failures.items()} == {0: Reason.OUT_OF_MEMORY}
    assert runner.tried == [[(0, 64)], [(0, 32)], [(32, 64)], [(32, 48)], [(48, 64)]]


def test_what_fails_for_another_reason_is_not_tried_in_shorter_chunks() -> None:
    engine, runner = make_engine(), PoisonedRunner(ValueError("bad"))
    engine.add(request("r", (POISON,) * 64))
    plan = engine.schedule()
    assert plan is not None
    assert list(run_isolated(runner, plan).failures) == [0]
    assert runner.steps == 1

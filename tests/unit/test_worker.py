"""The worker's loop: a step that raises costs its culprit and nobody else."""

from __future__ import annotations

import pytest
from waiting import wait_until

from penstock.gpu_worker.engine import Engine, EngineConfig, EngineRequest
from penstock.gpu_worker.engine.plan import Plan, StepOutput
from penstock.gpu_worker.metrics import WorkerMetrics
from penstock.gpu_worker.outbox import Outbox
from penstock.gpu_worker.synthetic import SyntheticRunner, build_synthetic
from penstock.gpu_worker.worker import Worker, run_isolated
from penstock.shared.operations import Claim
from penstock.shared.protocol import Lane, Reason, SamplingOptions, unpack_event
from penstock.shared.settings import Settings
from penstock.shared.synthetic import synthetic_tokens

POISON = 666


class PoisonedRunner(SyntheticRunner):
    """Raises whenever a step contains the poisoned prompt, like a kernel that meets bad data."""

    def __init__(self, error: Exception) -> None:
        super().__init__(0.0)
        self.error = error
        self.steps = 0

    def run(self, plan: Plan) -> StepOutput:
        self.steps += 1
        if any(POISON in span.sequence.token_ids for span in plan.spans):
            raise self.error
        return super().run(plan)


def make_engine() -> Engine:
    model = build_synthetic(Settings())
    config = EngineConfig(
        block_size=16,
        num_blocks=64,
        max_batch_tokens=64,
        max_sequences=8,
        chunk_size=64,
        max_model_len=256,
        eos_token_ids=frozenset(),
    )
    return Engine(config, model.new_text_stream)


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        id=name,
        lane=Lane.NORMAL,
        tenant="t",
        prompt_ids=prompt,
        options=SamplingOptions(max_tokens=max_tokens),
        seed=1,
        arrival=0.0,
    )


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
        (RuntimeError("shape mismatch"), Reason.ENGINE_ERROR),
    ],
)
def test_reason_tells_memory_from_other_errors(error: Exception, reason: str) -> None:
    engine = make_engine()
    engine.add(request("r", (POISON,)))
    plan = engine.schedule()
    assert plan is not None
    assert run_isolated(PoisonedRunner(error), plan).failures[0].reason == reason


def claim(name: str) -> Claim:
    return Claim(
        id=name,
        epoch=1,
        attempts=1,
        suspect=False,
        payload=b"",
        age_ms=0,
        queue_ms=0,
        ttft_ms=None,
        deadline_in_ms=1000,
        chunks=(),
    )


def test_loop_serves_while_it_isolates_and_aborts() -> None:
    metrics = WorkerMetrics()
    outbox = Outbox(metrics, wake=lambda: None)
    worker = Worker(make_engine(), PoisonedRunner(ValueError("bad")), outbox, metrics)
    for name in ("good", "poisoned", "aborted"):
        outbox.open(claim(name), "normal")
    worker.start()
    worker.add(request("good#1", (97,), max_tokens=20))
    worker.add(request("poisoned#1", (POISON,)))
    worker.add(request("aborted#1", (98,), max_tokens=200))
    worker.abort("aborted#1")
    ended = {}

    def drain() -> bool:
        for item in outbox.take(256):
            if item.end:
                ended[item.id] = unpack_event(item.end)
        return len(ended) == 2

    wait_until(drain, "both requests ended")
    assert {name: end.reason for name, end in ended.items()} == {
        "good": Reason.LENGTH,
        "poisoned": Reason.ENGINE_ERROR,
    }
    worker.stop()
    assert worker.join(5)
    assert worker.failure is None
    assert worker.stuck_for() == 0


def test_broken_engine_is_seen_from_outside() -> None:
    metrics = WorkerMetrics()
    outbox = Outbox(metrics, wake=lambda: None)
    worker = Worker(make_engine(), SyntheticRunner(0.0), outbox, metrics)
    worker.start()
    worker.add(request("twice", (97,), max_tokens=250))
    worker.add(request("twice", (97,)))  # a bug at the edge: the engine refuses to go on
    wait_until(lambda: worker.failure is not None, "the failure is visible")
    assert worker.join(5)

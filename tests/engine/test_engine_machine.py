"""The whole engine under random arrivals, lanes, cancels, crashes, failing steps and tiny pools."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

import pytest
from engine.fakes import (
    EOS,
    FakeRunner,
    PieceStream,
    config,
    request,
    solo,
)
from engine.machine_parts import (
    Log,
    MachineModel,
    Poisoned,
    defer_some,
    more_kv_cache_groups,
    prompts,
    speculations,
    stop_lists,
    timings,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput, StepTiming
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import Finish
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine_process.isolation import run_isolated
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane, Reason


class AheadEnd(Enum):
    """How a run of steps that were planned ahead ends."""

    COLLECT = auto()
    ABORT = auto()
    DROP = auto()


class EngineMachine(MachineModel):
    num_ahead = 0
    policy = PolicyName.FCFS
    chunking = Chunking.FIXED

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(1, 14),
        window=st.none() | st.integers(1, 8),
        more_kv_cache_groups=more_kv_cache_groups,
        max_sequences=st.integers(1, 6),
        more_tokens=st.integers(0, 12),
        chunk_size=st.integers(1, 10),
        max_model_len=st.integers(2, 30),
        prefix_cache=st.booleans(),
        salt_by_tenant=st.booleans(),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        max_overtake_s=st.sampled_from([0.0, 2.0, 30.0]),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        num_host_blocks=st.integers(0, 20),
        speculation=speculations,
        timing=timings,
    )
    def build(
        self,
        max_sequences: int,
        more_tokens: int,
        timing: Callable[[Plan], StepTiming | None],
        **limits: object,
    ) -> None:
        max_batch_tokens = max_sequences + more_tokens
        if self.chunking is Chunking.OFF:
            max_batch_tokens += limits["max_model_len"]  # type: ignore[operator]
            limits["chunk_size"] = max_batch_tokens
        self.config = config(
            max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, policy=self.policy,
            chunking=self.chunking, min_chunk_size=1, target_itl_s=1.0, **limits,
        )  # fmt: skip
        self.engine = Engine(self.config, PieceStream)
        self.runner = FakeRunner(self.config.block_size, self.config.kv_cache_groups, timing)
        self.live, self.ended, self.seen, self.arrivals = {}, [], {}, []
        self.num_made = 0
        self.now = 0.0

    # --- what happens to an engine

    @rule(
        prompt_ids=prompts,
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from(["x", "y"]),
        max_tokens=st.integers(1, 16),
        stop=stop_lists,
        stop_token_ids=st.sampled_from([(), (), (8,)]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        passed=st.sampled_from([0.0, 0.5, 3.0]),
        time_left=st.none() | st.sampled_from([-1.0, 0.5, 1.0, 8.0]),
    )
    def add(
        self, prompt_ids: list[int], passed: float, time_left: float | None, **options: object
    ) -> None:
        self.num_made += 1
        self.now += passed
        req = request(
            f"r{self.num_made}", prompt_ids, arrival=self.now,
            deadline=None if time_left is None else self.now + time_left, **options,
        )  # type: ignore[arg-type]  # fmt: skip
        self.admit(Log(req))

    @rule(
        shapes=st.lists(st.tuples(prompts, st.integers(4, 16)), min_size=2, max_size=6),
        lanes=st.lists(st.sampled_from(Lane), min_size=6, max_size=6),
        count=st.integers(1, 12),
    )
    def rush(self, shapes: list[tuple[list[int], int]], lanes: list[Lane], count: int) -> None:
        """More than there is room for, and a while undisturbed, so that KV gets short."""
        for (prompt_ids, max_tokens), lane in zip(shapes, lanes, strict=False):
            self.add(prompt_ids, 0.0, None, lane=lane, max_tokens=max_tokens)
            self.step()
        for _ in range(count):
            self.step()
            self.everything_adds_up()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        log = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        assert self.engine.abort(log.request.id)
        assert not self.engine.abort(log.request.id)
        self.forget(log)
        self.check_published(log)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def crash_and_continue(self, data: st.DataObject) -> None:
        log = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        assert self.engine.abort(log.request.id)
        self.forget(log)
        self.admit(log)

    @precondition(lambda self: any(log.token_ids for log in self.ended))
    @rule(data=st.data())
    def lose_the_end_of(self, data: st.DataObject) -> None:
        """The worker died between the last token and the end: the next one ends it alike."""
        log = data.draw(st.sampled_from([log for log in self.ended if log.token_ids]))
        again = replace(log.request, output_ids=tuple(log.token_ids))
        update = self.engine.add(again)
        assert update is not None
        assert update.finish is not None
        assert (update.start, update.token_ids, update.text, update.finish.reason) == (
            len(log.token_ids), (), "", log.reason,
        )  # fmt: skip

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 2.0, 50.0]))
    def step(self, seconds: float = 0.5) -> None:
        if (plan := self.plan()) is not None:
            (drafted, accepted), num_ended = self.unseen(), len(self.ended)
            self.collect(plan)
            now_drafted, now_accepted = self.unseen()
            assert now_drafted == drafted
            # What lies behind an end did not become output.
            assert now_accepted == accepted or (
                now_accepted > accepted and len(self.ended) > num_ended
            )
            self.engine.observe(plan, seconds)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_with_an_abort_in_flight(self, data: st.DataObject) -> None:
        plan = self.plan()
        assert plan is not None
        output = self.runner.run(plan)
        self.abort(data)
        for update in self.engine.collect(plan, output):
            self.publish(update)

    @precondition(lambda self: self.live)
    @rule(
        count=st.integers(1, 8),
        ends_with=st.sampled_from(AheadEnd),
        prepares=st.booleans(),
        data=st.data(),
    )
    def steps_planned_ahead(
        self, count: int, ends_with: AheadEnd, prepares: bool, data: st.DataObject
    ) -> None:
        """Each step but the first is planned and begun before the one before it is collected.

        It is planned when that one's tokens are known, or before.
        """
        plan = self.plan()
        assert plan is not None
        output = self.runner.run(plan)
        for left in reversed(range(count)):
            if left == 0 and ends_with is AheadEnd.ABORT and self.live:
                self.abort(data)  # before the next one is planned
            ahead = self.engine.schedule_ahead(output)
            if ahead is None:
                break
            self.num_ahead += 1
            self.check_ahead(ahead, plan, output)
            if left == 0 and ends_with is AheadEnd.DROP:
                self.take(plan, output)
                self.engine.drop(ahead)
                return
            self.engine.check_integrity()
            collects = functools.partial(self.take_beside, plan, output, prepares)
            plan, output = ahead, self.runner.run(ahead, collects)
        self.take(plan, output)

    def check_ahead(self, ahead: Plan, before: Plan, output: StepOutput) -> None:
        assert [span.sequence for span in ahead.spans] == [span.sequence for span in before.spans]
        assert [(i,) for i in ahead.token_ids] == list(output.token_ids)
        for span, last in zip(ahead.spans, before.spans, strict=True):
            assert (span.start, span.num_tokens) == (last.start + last.num_tokens, 1)
            assert span.samples
            assert not span.num_drafts
        is_full = len(before.spans) == self.config.max_sequences
        assert is_full or self.engine.load().waiting == {}

    def take_beside(self, plan: Plan, output: StepOutput, prepares: bool) -> None:
        self.take(plan, output)
        if prepares:
            prepared = self.engine.prepare_ahead()
            assert prepared is None or not (prepared.token_ids or prepared.copies)
            self.engine.check_integrity()

    def take(self, plan: Plan, output: StepOutput) -> None:
        for update in self.engine.collect(plan, output):
            self.publish(update)

    @precondition(lambda self: self.live)
    @rule(wrote=st.booleans())
    def failing_step(self, wrote: bool) -> None:
        plan = self.plan()
        assert plan is not None
        if wrote:
            self.runner.run(plan)
        updates = self.engine.fail(plan, Reason.ENGINE_ERROR, "injected")
        assert [u.id for u in updates] == [span.sequence.id for span in plan.spans]
        for update in updates:
            self.publish_failure(update)

    @precondition(lambda self: self.live)
    @rule()
    def step_that_moved_nothing(self) -> None:
        """The copies before the forward raised: nothing of the plan is computed or kept."""
        plan = self.plan()
        assert plan is not None
        failures = {i: Finish(Reason.ENGINE_ERROR, "injected") for i in range(len(plan.spans))}
        nothing = StepOutput(tuple(() for _ in plan.spans), failures, moved=False)
        for update in self.engine.collect(plan, nothing):
            self.publish_failure(update)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_isolated(self, data: st.DataObject) -> None:
        """The forward raises for one request, after the copies: its halves run without them."""
        plan = self.plan()
        assert plan is not None
        culprit = data.draw(st.sampled_from([span.sequence.id for span in plan.spans]))
        output = run_isolated(Poisoned(self.runner, culprit), plan)
        for update in self.engine.collect(plan, output):
            if update.id == culprit:
                self.publish_failure(update)
            else:
                self.publish(update)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_with_one_failure(self, data: st.DataObject) -> None:
        plan = self.plan()
        assert plan is not None
        output, index = self.runner.run(plan), data.draw(st.integers(0, len(plan.spans) - 1))
        failures = {index: Finish(Reason.ENGINE_ERROR, "injected")}
        for update in self.engine.collect(plan, replace(output, failures=failures)):
            if update.id == plan.spans[index].sequence.id:
                self.publish_failure(update)
            else:
                self.publish(update)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_that_defers_some(self, data: st.DataObject) -> None:
        plan = self.plan()
        assert plan is not None
        output = defer_some(plan, self.runner.run(plan), data)
        deferred, updates = output.deferred, self.engine.collect(plan, output)
        assert not {u.id for u in updates} & {plan.spans[i].sequence.id for i in deferred}
        for update in updates:
            self.publish(update)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            assert self.engine.has_work == bool(self.live)
            self.check_drafts()

    def teardown(self) -> None:
        """Without further arrivals everything ends, in a bounded number of steps."""
        if not hasattr(self, "engine"):
            return
        work = sum(
            len(log.request.prompt_ids) + log.request.options.max_tokens
            for log in self.live.values()
        )
        bound = work * (len(self.live) + 1)
        for _ in range(bound):
            self.step()
            self.everything_adds_up()
        assert not self.live
        assert self.engine.schedule() is None
        assert self.engine.stats().used_blocks == 0
        assert self.engine.stats().used_host_blocks == 0


DEFAULT = (PolicyName.FCFS, Chunking.FIXED)
CASES = list(itertools.product(PolicyName, Chunking))


# Drawn like the rest, some of them would hardly ever come: each has its own share of the examples.
@pytest.mark.parametrize(
    ("policy", "chunking", "examples"),
    [
        (*DEFAULT, 30),
        *((*case, 6) for case in CASES if case != DEFAULT),
        *(pytest.param(*case, 200, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_engine_machine(policy: PolicyName, chunking: Chunking, examples: int) -> None:
    limits = settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,  # a busy machine is no finding
        suppress_health_check=[HealthCheck.too_slow],
    )
    choice = {"policy": policy, "chunking": chunking}
    run_state_machine_as_test(type("Machine", (EngineMachine,), choice), settings=limits)


def test_the_model_reaches_every_end() -> None:
    """The machine above would prove nothing about ends that its model never comes to."""
    cfg = config(num_blocks=5, max_model_len=24)
    ends = set()
    for first in range(9):
        for max_tokens in (3, 50):
            for options in ({"ignore_eos": False}, {"stop": ("ab",)}, {"stop": ("é",)}):
                req = request("r", [first], max_tokens=max_tokens, **options)
                result = solo(req, cfg)
                ends.add((result.reason, result.token_ids[-1] == EOS, "stop" in options))
    assert ends >= {
        (Reason.STOP, True, False),
        (Reason.STOP, False, True),
        (Reason.LENGTH, False, True),
        (Reason.OUT_OF_MEMORY, False, True),
    }

"""Requests with several outputs under random company, cancels, crashes and tiny pools."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from engine.fakes import (
    FakeRunner,
    PieceStream,
    Result,
    capacity,
    config,
    prompt_report,
    request,
    solo,
)
from engine.test_engine_machine import Poisoned, defer_some, speculations, timings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.output.step_output import StepTiming
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import (
    EngineRequest,
    Finish,
    Update,
)
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine_process.isolation import run_isolated
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane, Reason

PROMPTS = st.integers(1, 14).map(lambda n: [1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1, 2][:n])
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"n": 2, "prompt_logprobs": 0},
    {"n": 3, "temperature": 0},
    {"n": 5},
    {"best_of": 3},
    {"n": 2, "best_of": 4},
    {"beam_width": 2},
    {"beam_width": 4, "n": 3},
    {"beam_width": 3, "n": 2, "early_stopping": True, "length_penalty": -1.0},
    {"beam_width": 3, "early_stopping": "never", "length_penalty": 2.0},
]
FAILED = (Reason.OUT_OF_MEMORY, Reason.ENGINE_ERROR)


def outputs_of(req: EngineRequest, cfg: EngineConfig) -> list[Result]:
    """What each choice of a request is where there is room for everything."""
    options = req.options
    streams = options.num_sequences == options.n and options.beam_width == 1
    if streams:
        return [solo(req, cfg, choice) for choice in range(options.n)]
    roomy = config(
        block_size=cfg.block_size,
        num_blocks=500,
        max_sequences=8,
        max_model_len=cfg.max_model_len,
        salt_by_tenant=cfg.salt_by_tenant,
    )
    log = Log(req)
    engine, runner = Engine(roomy, PieceStream), FakeRunner(roomy.block_size)
    assert engine.add(req) is None
    while (plan := engine.schedule()) is not None:
        for update in engine.collect(plan, runner.run(plan)):
            log.publish(update)
    return [log.result(choice) for choice in sorted(log.token_ids)]


@dataclass
class Log:
    """What was published of one request, as the log of a real one would hold it."""

    request: EngineRequest
    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, Reason] = field(default_factory=dict)
    reason: Reason | None = None

    def publish(self, update: Update) -> None:
        several = self.request.options.n > 1
        assert self.reason is None, "an update after the end"
        assert update.token_ids or (update.finish is not None and not update.text)
        assert update.prompt_tokens == len(self.request.prompt_ids)
        assert len(update.parts) == (several and bool(update.token_ids))
        asked = self.request.options.prompt_logprobs is not None
        tells = asked and bool(update.token_ids) and not self.token_ids
        ids = self.request.prompt_ids
        assert update.prompt_logprobs == ((None, *map(prompt_report, ids[1:])) if tells else ())
        if update.token_ids:
            choice, known = update.choice, self.token_ids.get(update.choice, ())
            assert update.start == len(known)
            assert choice not in self.reasons, "a token after its choice's end"
            self.token_ids[choice] = known + update.token_ids
            self.texts[choice] = self.texts.get(choice, "") + update.text
            for part in update.parts:
                assert part[:2] == (choice, update.start)
                assert part[2:4] == (len(update.token_ids), update.text)
                self.reasons.update({} if part.reason is None else {choice: part.reason})
        if update.finish is not None:
            self.reason = update.finish.reason
            if not several and update.token_ids:
                self.reasons[0] = update.finish.reason

    def result(self, choice: int) -> Result:
        return Result(self.token_ids[choice], self.texts[choice], self.reasons[choice])

    def continued(self) -> EngineRequest:
        if self.request.options.n == 1:
            return replace(self.request, output_ids=self.token_ids.get(0, ()))
        choices = range(self.request.options.n)
        ids = tuple(self.token_ids.get(choice, ()) for choice in choices)
        return replace(self.request, choice_ids=ids)


class GroupMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 30),
        max_sequences=st.integers(1, 6),
        more_tokens=st.integers(0, 12),
        chunk_size=st.integers(1, 10),
        max_model_len=st.integers(4, 24),
        prefix_cache=st.booleans(),
        salt_by_tenant=st.booleans(),
        watermark=st.sampled_from([0.0, 0.3]),
        policy=st.sampled_from(PolicyName),
        chunking=st.sampled_from(Chunking),
        preemption=st.sampled_from(["swap", "recompute"]),
        num_host_blocks=st.integers(0, 20),
        window=st.none() | st.integers(1, 8),
        more_kv_cache_groups=st.just(())
        | st.tuples(
            st.builds(KVCacheGroup, st.integers(4, 30), st.integers(1, 6), st.integers(0, 20))
        ),
        speculation=speculations,
        timing=timings,
    )
    def build(
        self,
        max_sequences: int,
        more_tokens: int,
        chunking: Chunking,
        timing: Callable[[Plan], StepTiming | None],
        **limits: object,
    ) -> None:
        max_batch_tokens = max_sequences + more_tokens
        if chunking is Chunking.OFF:
            max_batch_tokens += limits["max_model_len"]  # type: ignore[operator]
            limits["chunk_size"] = max_batch_tokens
        self.config: EngineConfig = config(
            max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, chunking=chunking,
            min_chunk_size=1, target_itl_s=1.0, **limits,
        )  # fmt: skip
        self.engine = Engine(self.config, PieceStream)
        self.runner = FakeRunner(self.config.block_size, self.config.kv_cache_groups, timing)
        self.live: dict[str, Log] = {}
        self.ended: list[Log] = []
        self.num_made = 0

    # --- what happens to an engine

    @rule(
        prompt_ids=PROMPTS,
        kind=st.sampled_from(KINDS),
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from(["x", "y"]),
        max_tokens=st.integers(1, 10),
        stop_token_ids=st.sampled_from([(), (), (8,)]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt_ids: list[int], kind: dict[str, Any], **options: Any) -> None:
        self.num_made += 1
        req = request(f"r{self.num_made}", prompt_ids, **kind, **options)
        log = Log(req)
        update = self.engine.add(req)
        if update is None:
            self.live[req.id] = log
            return
        log.publish(update)
        cfg, width, num_prompt = self.config, req.options.beam_width, len(prompt_ids)
        longest = min(num_prompt + req.options.max_tokens, cfg.max_model_len)
        short = any(
            width * held(cfg, group, longest) > group.num_blocks for group in cfg.kv_cache_groups
        )
        assert log.reason is not None
        assert log.reason.state.value == "failed"
        assert (
            num_prompt >= cfg.max_model_len
            or num_prompt > capacity(cfg)
            or (width > 1 and (width > cfg.max_sequences or short))
        )

    @rule(
        kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=4),
        prompt_ids=PROMPTS,
        count=st.integers(1, 12),
    )
    def rush(self, kinds: list[dict[str, Any]], prompt_ids: list[int], count: int) -> None:
        """More than there is room for, and a while undisturbed, so that KV gets short."""
        for kind, lane in zip(kinds, itertools.cycle(Lane), strict=False):
            self.add(prompt_ids, kind, lane=lane, max_tokens=10)
            self.step()
        for _ in range(count):
            self.step()
            self.everything_adds_up()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), again=st.booleans())
    def abort(self, data: st.DataObject, again: bool) -> None:
        """It was cancelled; or its worker crashed, and this one takes it over."""
        log = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        assert self.engine.abort(log.request.id)
        assert not self.engine.abort(log.request.id)
        self.check_published(log)
        if again:
            assert self.engine.add(log.continued()) is None
            self.live[log.request.id] = log

    @precondition(lambda self: any(not failed(log) for log in self.ended))
    @rule(data=st.data())
    def lose_the_end_of(self, data: st.DataObject) -> None:
        log = data.draw(st.sampled_from([log for log in self.ended if not failed(log)]))
        update = self.engine.add(log.continued())
        assert update is not None
        assert update.finish is not None
        assert (update.token_ids, update.text, update.finish.reason) == ((), "", log.reason)

    @rule()
    def step(self) -> None:
        if (plan := self.plan()) is not None:
            self.publish(self.engine.collect(plan, self.runner.run(plan)))
            self.engine.observe(plan, 0.5)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_with_an_abort_in_flight(self, data: st.DataObject) -> None:
        plan = self.plan()
        assert plan is not None
        output = self.runner.run(plan)
        self.abort(data, again=False)
        self.publish(self.engine.collect(plan, output))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_with_a_failure(self, data: st.DataObject) -> None:
        plan = self.plan()
        assert plan is not None
        output, index = self.runner.run(plan), data.draw(st.integers(0, len(plan.spans) - 1))
        failures = {index: Finish(Reason.ENGINE_ERROR, "injected")}
        self.publish(self.engine.collect(plan, replace(output, failures=failures)))
        assert plan.spans[index].sequence.id not in self.live

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_isolated(self, data: st.DataObject) -> None:
        """The forward raises for one request, after the copies: its halves run without them."""
        plan = self.plan()
        assert plan is not None
        culprit = data.draw(st.sampled_from([span.sequence.id for span in plan.spans]))
        output = run_isolated(Poisoned(self.runner, culprit), plan)
        self.publish(self.engine.collect(plan, output))
        assert culprit not in self.live

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_that_defers_some(self, data: st.DataObject) -> None:
        """Those whose mask is late; beams have none."""
        plan = self.plan()
        assert plan is not None
        self.publish(self.engine.collect(plan, defer_some(plan, self.runner.run(plan), data)))

    @precondition(lambda self: self.live)
    @rule(moved=st.booleans())
    def failing_step(self, moved: bool) -> None:
        """Before or after the copies that the plan begins with."""
        plan = self.plan()
        assert plan is not None
        if moved:
            self.runner.run(plan)
        updates = self.engine.fail(plan, Reason.ENGINE_ERROR, "injected")
        ids = [update.id for update in updates]
        assert sorted(ids) == sorted({span.sequence.id for span in plan.spans})
        self.publish(updates)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            assert self.engine.has_work == bool(self.live)

    def teardown(self) -> None:
        """Without further arrivals everything ends, in a bounded number of steps."""
        if not hasattr(self, "engine"):
            return
        work = sum(
            log.request.options.num_sequences
            * (len(log.request.prompt_ids) + log.request.options.max_tokens)
            for log in self.live.values()
        )
        for _ in range(work * (len(self.live) + 1)):
            if not self.live:
                break
            self.step()
            self.everything_adds_up()
        assert not self.live
        assert self.engine.schedule() is None
        assert self.engine.stats().used_blocks == 0
        assert self.engine.stats().used_host_blocks == 0

    # --- what must hold

    def plan(self) -> Plan | None:
        plan = self.engine.schedule()
        assert (plan is not None) == bool(self.live)
        self.engine.check_integrity()
        if plan is None:
            return None
        cfg, planned = self.config, [span.sequence for span in plan.spans]
        assert plan.num_tokens <= cfg.max_batch_tokens
        assert len(planned) <= cfg.max_sequences
        assert sum(self.engine.stats().running.values()) <= cfg.max_sequences
        assert all(span.num_tokens <= cfg.chunk_size for span in plan.spans)
        if cfg.chunking is Chunking.OFF:
            assert all(span.samples for span in plan.spans)
        return plan

    def publish(self, updates: list[Update]) -> None:
        for update in updates:
            log = self.live[update.id]
            log.publish(update)
            if log.reason is not None:
                del self.live[update.id]
                self.check_ended(log)

    def check_ended(self, log: Log) -> None:
        self.check_published(log)
        if failed(log):
            return
        self.ended.append(log)
        expected = outputs_of(log.request, self.config)
        assert [log.result(choice) for choice in sorted(log.token_ids)] == expected
        all_stopped = {result.reason for result in expected} == {Reason.STOP}
        assert log.reason is (Reason.STOP if all_stopped else Reason.LENGTH)

    def check_published(self, log: Log) -> None:
        """What was published of each choice is the begin of what it gives alone."""
        if not log.token_ids:
            return
        whole = outputs_of(log.request, self.config)
        for choice, ids in log.token_ids.items():
            assert whole[choice].token_ids[: len(ids)] == ids
            assert whole[choice].text.startswith(log.texts[choice])


def held(cfg: EngineConfig, group: KVCacheGroup, num_tokens: int) -> int:
    """Most blocks of a group that a sequence holds until it has so many tokens."""
    size = cfg.block_size
    span = (group.window or num_tokens) - 1 + min(cfg.chunk_size, cfg.max_batch_tokens) + size - 1
    return min(-(-num_tokens // size), 1 + -(-(span - 1) // size))


def failed(log: Log) -> bool:
    return log.reason in FAILED


def in_examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=50,
        deadline=None,  # a busy machine is no finding
        suppress_health_check=[HealthCheck.too_slow],
    )


class TestGroupMachine(GroupMachine.TestCase):
    settings = in_examples(60)


@pytest.mark.slow
class TestGroupMachineForLong(GroupMachine.TestCase):
    settings = in_examples(300)

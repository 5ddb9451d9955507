"""The whole engine under random arrivals, lanes, cancels, crashes, failing steps and tiny pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from engine.fakes import (
    EOS,
    FakeRunner,
    PieceStream,
    Result,
    capacity,
    config,
    prompt_report,
    request,
    solo,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.gpu_worker.engine import (
    Chunking,
    Engine,
    EngineConfig,
    EngineRequest,
    Finish,
    KVKind,
    Plan,
    PolicyName,
    PreemptionCause,
    Sequence,
    SequenceStatus,
    SpeculationConfig,
    StepOutput,
    Update,
)
from penstock.gpu_worker.engine.stats import Preemption
from penstock.gpu_worker.worker import run_isolated
from penstock.shared.protocol import Lane, Reason

prompts = st.one_of(
    st.lists(st.integers(0, 8), min_size=1, max_size=14),
    st.integers(1, 14).map(lambda n: [1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1, 2][:n]),
)
stop_lists = st.lists(st.sampled_from(["ab", "aab ", "é", "ba\ufffd", " ", "bb"]), max_size=2)


more_kinds = st.just(()) | st.tuples(
    st.builds(KVKind, st.integers(1, 14), st.integers(1, 6), st.integers(0, 20))
)


speculations = st.none() | st.builds(
    SpeculationConfig,
    ngram=st.booleans(),
    draft=st.booleans(),
    length=st.none() | st.integers(1, 6),
    longest=st.integers(1, 6),
)


@dataclass
class Log:
    """What was published of one request, as the log of a real one would hold it."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: Reason | None = None

    def publish(self, update: Update) -> None:
        assert self.reason is None, "an update after the end"
        assert update.start == len(self.token_ids)
        assert update.token_ids or update.finish is not None
        assert update.token_ids or not update.text
        asked = self.request.options.prompt_logprobs is not None
        tells = asked and bool(update.token_ids) and not self.token_ids
        ids = self.request.prompt_ids
        assert update.prompt_logprobs == ((None, *map(prompt_report, ids[1:])) if tells else ())
        assert update.prompt_tokens == len(self.request.prompt_ids)
        assert 0 <= update.cached_tokens < update.prompt_tokens + len(self.token_ids) + 1
        self.token_ids += update.token_ids
        self.text += update.text
        self.reason = update.finish.reason if update.finish is not None else None


class Poisoned:
    """Raises in every forward that holds the culprit, when copies and writes are done."""

    def __init__(self, runner: FakeRunner, culprit: str) -> None:
        self.runner, self.culprit = runner, culprit

    def run(self, plan: Plan) -> StepOutput:
        output = self.runner.run(plan)
        if any(span.sequence.id == self.culprit for span in plan.spans):
            raise ValueError("injected")
        return output


@dataclass(frozen=True)
class Before:
    """What there was before a step was planned; ``times`` each had been preempted."""

    running: list[Sequence]
    times: dict[Sequence, int]
    preemptions: Mapping[Preemption, int]


def defer_some(plan: Plan, output: StepOutput, data: st.DataObject) -> StepOutput:
    """The same with some spans deferred, as beams never are."""
    could = [i for i, s in enumerate(plan.spans) if s.samples and not s.sequence.num_candidates]
    deferred = frozenset(data.draw(st.sets(st.sampled_from(could))) if could else ())
    token_ids = tuple(() if i in deferred else t for i, t in enumerate(output.token_ids))
    return replace(output, token_ids=token_ids, deferred=deferred)


class EngineMachine(RuleBasedStateMachine):
    policy = PolicyName.FCFS
    chunking = Chunking.FIXED

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(1, 14),
        window=st.none() | st.integers(1, 8),
        more_kinds=more_kinds,
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
    )
    def build(self, max_sequences: int, more_tokens: int, **limits: object) -> None:
        max_batch_tokens = max_sequences + more_tokens
        if self.chunking is Chunking.OFF:
            max_batch_tokens += limits["max_model_len"]  # type: ignore[operator]
            limits["chunk_size"] = max_batch_tokens
        self.config: EngineConfig = config(
            max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, policy=self.policy,
            chunking=self.chunking, min_chunk_size=1, target_itl_s=1.0, **limits,
        )  # fmt: skip
        self.engine = Engine(self.config, PieceStream)
        self.runner = FakeRunner(self.config.block_size, self.config.kinds)
        self.live: dict[str, Log] = {}
        self.ended: list[Log] = []
        self.seen: dict[str, Sequence] = {}  # sequences of live requests, as plans showed them
        self.arrivals: list[str] = []  # live requests that were never planned, in order of arrival
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
            before = self.unseen()
            self.collect(plan)
            assert self.unseen() == before
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

    def check_drafts(self) -> None:
        """What was drafted was accepted or rejected; aborted sequences are not looked at again."""
        stats = self.engine.stats().speculation
        if stats is None:
            assert self.runner.num_drafted == 0
            return
        drafted, accepted = stats.drafted, stats.accepted
        assert sum(drafted.values()) <= self.runner.num_drafted
        assert sum(accepted.values()) <= self.runner.num_accepted
        for (source, position), count in drafted.items():
            assert accepted.get((source, position), 0) <= count
            # A draft is accepted only if the one before it was.
            before = accepted.get((source, position - 1), count)
            assert accepted.get((source, position), 0) <= before

    def unseen(self) -> tuple[int, int]:
        """Drafts and accepted ones whose outcome the engine did not get to see."""
        stats = self.engine.stats().speculation
        drafted, accepted = self.runner.num_drafted, self.runner.num_accepted
        if stats is None:
            return drafted, accepted
        return drafted - sum(stats.drafted.values()), accepted - sum(stats.accepted.values())

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

    # --- what must hold

    def admit(self, log: Log) -> None:
        req, cfg = replace(log.request, output_ids=tuple(log.token_ids)), self.config
        update = self.engine.add(req)
        num_prompt, most = len(req.prompt_ids), capacity(cfg)
        if update is None:
            assert num_prompt < cfg.max_model_len
            assert num_prompt + len(req.output_ids) <= most
            self.live[req.id] = log
            self.arrivals.append(req.id)
            return
        log.publish(update)
        assert not log.token_ids, "a request that was going on cannot end by moving"
        too_long = num_prompt + 1 > cfg.max_model_len
        assert too_long or num_prompt > most
        assert log.reason is (Reason.PROMPT_TOO_LONG if too_long else Reason.OUT_OF_MEMORY)

    def plan(self) -> Plan | None:
        times = {s: s.num_preemptions for s in self.running()}
        before = Before(list(times), times, self.engine.stats().preemptions)
        plan = self.engine.schedule()
        assert (plan is not None) == bool(self.live)
        if plan is not None:
            self.check_plan(plan, before)
        self.engine.check_integrity()
        return plan

    def running(self) -> list[Sequence]:
        return [s for s in self.seen.values() if s.status is SequenceStatus.RUNNING]

    def check_plan(self, plan: Plan, before: Before) -> None:
        cfg, planned = self.config, [span.sequence for span in plan.spans]
        assert plan.num_tokens <= cfg.max_batch_tokens
        assert len(planned) <= cfg.max_sequences
        assert all(span.num_tokens <= cfg.chunk_size for span in plan.spans)
        if cfg.chunking is Chunking.OFF:
            assert all(span.samples for span in plan.spans)
        self.check_admissions([s for s in planned if s.id not in self.seen])
        for sequence in planned:
            self.seen[sequence.id] = sequence
        # Who ran before either advances or was preempted, and then for somebody at least as urgent:
        # nobody less urgent than a victim goes on, and only more urgent ones take its place.
        victims = [s for s in before.running if s not in planned]
        preempted = Counter(self.engine.stats().preemptions)
        preempted.subtract(before.preemptions)
        assert len(victims) == preempted.total()
        assert {s for s in before.running if s.num_preemptions > before.times[s]} == set(victims)
        admitted = set(planned) - set(before.running)
        displaced = sum(preempted[key] for key in preempted if key[1] is PreemptionCause.URGENT)
        assert admitted or not displaced, "somebody was displaced for nobody"
        for victim in victims:
            assert victim.status is SequenceStatus.WAITING
        # By priority, old work of a lane may be safe from urgent work that newer work is not.
        if cfg.policy is not PolicyName.PRIORITY or not displaced:
            assert all(s.rank <= victim.rank for s in planned for victim in victims)
        if cfg.policy is not PolicyName.PRIORITY:
            assert all(s.rank < victim.rank for s in admitted for victim in victims)
        # One always advances who is as urgent as the first before, so somebody always ends.
        if before.running:
            assert any(s.rank <= min(r.rank for r in before.running) for s in planned)

    def check_admissions(self, admitted: list[Sequence]) -> None:
        """Lane by lane, and nobody is overtaken by who came later than the bound allows."""
        ids, policy = {s.id for s in admitted}, self.config.policy
        rank = {id: self.live[id].request.lane.rank for id in self.arrivals}
        in_line = sorted(self.arrivals, key=lambda id: rank[id])
        self.arrivals = [id for id in self.arrivals if id not in ids]
        if policy is PolicyName.FCFS:
            assert set(in_line[: len(ids)]) == ids
        if policy is not PolicyName.PRIORITY:
            assert [rank[id] for id in in_line[: len(ids)]] == sorted(rank[id] for id in ids)
        for sequence in admitted:
            for left in (self.live[id].request for id in self.arrivals):
                if left.lane is sequence.lane:
                    late = sequence.arrival - left.arrival
                    assert late <= self.config.max_overtake_s or policy is PolicyName.FCFS

    def collect(self, plan: Plan) -> None:
        updates = self.engine.collect(plan, self.runner.run(plan))
        assert [u.id for u in updates] == [s.sequence.id for s in plan.spans if s.samples]
        for update in updates:
            self.publish(update)

    def publish(self, update: Update) -> None:
        log = self.live[update.id]
        log.publish(update)
        if log.reason is not None:
            result = Result(tuple(log.token_ids), log.text, log.reason)
            assert result == solo(log.request, self.config)
            self.forget(log)
            self.ended.append(log)

    def publish_failure(self, update: Update) -> None:
        log = self.live[update.id]
        log.publish(update)
        assert (update.token_ids, log.reason) == ((), Reason.ENGINE_ERROR)
        self.check_published(log)
        self.forget(log)

    def check_published(self, log: Log) -> None:
        """What was published of an unfinished request is the begin of what it gives alone."""
        whole = solo(log.request, self.config)
        assert whole.token_ids[: len(log.token_ids)] == tuple(log.token_ids)
        assert whole.text.startswith(log.text)

    def forget(self, log: Log) -> None:
        id = log.request.id
        del self.live[id]
        self.seen.pop(id, None)
        if id in self.arrivals:
            self.arrivals.remove(id)


# Drawn like the rest, some of them would hardly ever come: each has its own share of the examples.
@pytest.mark.parametrize("chunking", list(Chunking))
@pytest.mark.parametrize("policy", list(PolicyName))
def test_engine_machine(policy: PolicyName, chunking: Chunking) -> None:
    default = policy is PolicyName.FCFS and chunking is Chunking.FIXED
    limits = settings(
        max_examples=100 if default else 10,
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

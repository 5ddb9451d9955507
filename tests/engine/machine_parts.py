"""What the machine of the engine draws, remembers and does to a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.fakes import (
    FakeRunner,
    Result,
    capacity,
    prompt_report,
    solo,
    untimed,
)
from engine.waiting_sequences import may_overtake
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
)

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.output.step_output import StepOutput, StepTiming
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest, Update
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionCause, PreemptionKey
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine.sequence import Sequence, SequenceStatus
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Reason

prompts = st.one_of(
    st.lists(st.integers(0, 8), min_size=1, max_size=14),
    st.integers(1, 14).map(lambda n: [1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1, 2][:n]),
)
stop_lists = st.lists(st.sampled_from(["ab", "aab ", "é", "ba\ufffd", " ", "bb"]), max_size=2)


more_kv_cache_groups = st.just(()) | st.tuples(
    st.builds(KVCacheGroup, st.integers(1, 14), st.integers(1, 6), st.integers(0, 20))
)


speculations = st.none() | st.builds(
    SpeculationConfig,
    ngram=st.booleans(),
    memory=st.booleans(),
    draft=st.booleans(),
    length=st.none() | st.integers(1, 6),
    longest=st.integers(1, 6),
)


def now_and_then(plan: Plan) -> StepTiming | None:
    """Steps as long as their tokens are many, some of which nobody has timed."""
    return StepTiming(1 + plan.num_tokens / 100) if plan.num_tokens % 7 else None


timings = st.sampled_from([untimed, now_and_then])


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

    def recover(self) -> None:
        """Nothing was lost."""


@dataclass(frozen=True)
class Before:
    """What there was before a step was planned; ``times`` each had been preempted."""

    running: list[Sequence]
    times: dict[Sequence, int]
    preemptions: Mapping[PreemptionKey, int]


def defer_some(plan: Plan, output: StepOutput, data: st.DataObject) -> StepOutput:
    """The same with some spans deferred, as beams never are."""
    could = [i for i, s in enumerate(plan.spans) if s.samples and not s.sequence.num_candidates]
    deferred = frozenset(data.draw(st.sets(st.sampled_from(could))) if could else ())
    token_ids = tuple(() if i in deferred else t for i, t in enumerate(output.token_ids))
    return replace(output, token_ids=token_ids, deferred=deferred)


class MachineModel(RuleBasedStateMachine):
    """What is known of the engine's requests, and what must hold of its plans and updates."""

    config: EngineConfig
    engine: Engine
    runner: FakeRunner
    live: dict[str, Log]
    ended: list[Log]
    seen: dict[str, Sequence]  # sequences of live requests, as plans showed them
    arrivals: list[str]  # live requests that were never planned, in order of arrival
    now: float

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
        # By priority, old work of a lane may be safe from urgent work that newer work is not; and
        # so is, by any order, what was preempted before and waited for too long.
        safe = {s for s in planned if displaced and s.num_preemptions}
        if cfg.policy is not PolicyName.PRIORITY or not displaced:
            assert all(s.rank <= victim.rank for s in set(planned) - safe for victim in victims)
        if cfg.policy is not PolicyName.PRIORITY:
            assert all(s.rank < victim.rank for s in admitted - safe for victim in victims)
        # One always advances who is as urgent as the first before, so somebody always ends.
        if before.running:
            assert any(s.rank <= min(r.rank for r in before.running) for s in planned)

    def check_admissions(self, admitted: list[Sequence]) -> None:
        """Lane by lane, and nobody is overtaken by whom the policy does not let go first."""
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
                    assert may_overtake(policy, self.config.max_overtake_s, sequence, left)

    def collect(self, plan: Plan) -> None:
        before = self.engine.stats().output_tokens
        updates = self.engine.collect(plan, self.runner.run(plan))
        came = self.engine.stats().output_tokens - before
        assert came == sum(len(update.token_ids) for update in updates)
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

"""Preemption by swap: what is kept on the host, who gives it back when, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.fakes import FakeRunner, PieceStream, config, request, solo

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.host_pool import HostPool
from penstock.gpu_worker.engine.kv.kv_cache_groups import NO_BLOCK, KVCacheGroup
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import BlockCopy, Plan
from penstock.gpu_worker.engine.requests.engine_request import Finish
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionCause, PreemptionMode
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.errors import ConfigurationError, IntegrityError
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason


def sequence(name: str, blocks: list[int], computed: int) -> Sequence:
    made = Sequence(id=name, prompt_ids=range(computed + 1), options=SamplingOptions())
    made.block_tables, made.num_computed_tokens = (blocks,), computed
    return made


class TestHostPool:
    def test_saves_computed_blocks_and_restores_what_the_prefix_cache_lacks(self) -> None:
        host, out, back = HostPool([KVCacheGroup(9, num_host_blocks=4)], 4), [], []
        one = sequence("one", [7, 8, 9], computed=5)
        assert host.try_save(one, out)
        assert [copy.source for copy in out] == [7, 8], "block 9 holds nothing computed"
        kept = [copy.target for copy in out]
        assert (one.host_blocks, one.num_swapped_tokens, host.num_used) == ((tuple(kept),), 5, 2)
        host.check_integrity([one])
        one.block_tables, one.num_computed_tokens = ([3, 1, 2],), 4
        host.restore(one, back)
        assert back == [BlockCopy(kept[1], 1)]
        assert (one.num_computed_tokens, one.host_blocks, host.num_used) == (5, (), 0)
        assert (host.num_out, host.num_in) == (2, 1)

    def test_copies_nothing_back_where_the_prefix_cache_has_more(self) -> None:
        host, back = HostPool([KVCacheGroup(9, num_host_blocks=4)], 4), []
        one = sequence("one", [7], computed=3)
        assert host.try_save(one, [])
        one.block_tables, one.num_computed_tokens = ([3, 1, 2],), 8
        host.restore(one, back)
        assert (back, one.num_computed_tokens, host.num_used) == ([], 8, 0)

    def test_a_full_pool_refuses_and_changes_nothing(self) -> None:
        host, out = HostPool([KVCacheGroup(9, num_host_blocks=2)], 4), []
        one, two = sequence("one", [1], 2), sequence("two", [2, 3], 7)
        assert host.try_save(one, out)
        assert not host.try_save(two, out)
        assert (len(out), two.host_blocks, two.num_swapped_tokens) == (1, (), 0)
        assert (host.num_refusals, host.num_used) == (1, 1)

    def test_what_was_never_copied_is_not_kept(self) -> None:
        host = HostPool([KVCacheGroup(9, num_host_blocks=4)], 4)
        confirmed, doubtful = sequence("one", [1], 2), sequence("two", [2], 2)
        host.try_save(confirmed, [])
        host.confirm_saves()
        host.try_save(doubtful, [])
        host.discard_saves()
        assert (len(confirmed.host_blocks[0]), confirmed.num_swapped_tokens) == (1, 2)
        assert (doubtful.host_blocks, doubtful.num_swapped_tokens) == ((), 0)
        host.check_integrity([confirmed, doubtful])

    def test_each_group_keeps_what_its_window_shows(self) -> None:
        host = HostPool(
            [
                KVCacheGroup(9, num_host_blocks=3, block_bytes=7),
                KVCacheGroup(9, 4, 1, block_bytes=5),
            ],
            4,
        )
        out, back = [], []
        one = sequence("one", [7, 8, 9], computed=11)  # the next token sees positions 8 to 11
        one.block_tables += ([NO_BLOCK, NO_BLOCK, 3],)
        assert host.try_save(one, out)
        assert [(copy.source, copy.group) for copy in out] == [(7, 0), (8, 0), (9, 0), (3, 1)]
        assert host.bytes_out == 3 * 7 + 5
        host.check_integrity([one])
        one.block_tables, one.num_computed_tokens = ([5, 6, 0], [NO_BLOCK, 2, 1]), 4
        host.restore(one, back)
        assert [(copy.target, copy.group) for copy in back] == [(6, 0), (0, 0), (1, 1)]
        assert host.bytes_in == 2 * 7 + 5
        two = sequence("two", [7], computed=3)
        two.block_tables += ([4],)
        assert host.try_save(two, [])
        three = sequence("three", [1], computed=3)
        three.block_tables += ([5],)
        assert not host.try_save(three, []), "one pool has room, the other has not"
        host.check_integrity([two, three])

    def test_check_integrity_notices(self) -> None:
        host = HostPool([KVCacheGroup(9, num_host_blocks=4)], 4)
        one, two = sequence("one", [1], 2), sequence("two", [2], 2)
        assert host.try_save(one, [])
        assert host.try_save(two, [])
        host.check_integrity([one, two])
        with pytest.raises(IntegrityError, match="3 owned or free, not 4"):
            host.check_integrity([one])  # a block is lost
        two.host_blocks = one.host_blocks
        with pytest.raises(IntegrityError, match="host blocks"):
            host.check_integrity([one, two])  # owned twice
        two.num_swapped_tokens = 5
        with pytest.raises(IntegrityError, match="5 tokens in"):
            host.check_integrity([one, two])


class Bench:
    """Two requests that do not fit together; the less urgent one is preempted for the other."""

    def __init__(self, **changes: object) -> None:
        self.config = config(
            **{
                "num_blocks": 6,
                "prefix_cache": False,
                "preemption": "swap",
                "num_host_blocks": 8,
                "watermark": 0.0,
                **changes,
            }
        )
        self.engine = Engine(self.config, PieceStream)
        self.runner = FakeRunner(self.config.block_size)
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, Reason] = {}

    def add(self, name: str, size: int, lane: Lane, max_tokens: int = 9) -> None:
        made = request(name, range(1, size + 1), lane=lane, max_tokens=max_tokens)
        made = replace(made, prompt_ids=tuple(1 + i % 8 for i in range(size)))
        self.tokens[name] = solo(made, self.config).token_ids
        assert self.engine.add(made) is None

    def plan(self) -> Plan:
        plan = self.engine.schedule()
        assert plan is not None
        self.engine.check_integrity()
        return plan

    def step(self, plan: Plan | None = None) -> Plan:
        plan = self.plan() if plan is None else plan
        for update in self.engine.collect(plan, self.runner.run(plan)):
            expected = self.tokens[update.id]
            assert update.token_ids == expected[update.start : update.start + 1]
            if update.finish is not None:
                self.ended[update.id] = update.finish.reason
        self.engine.check_integrity()
        return plan

    def until_swapped(self) -> Plan:
        """The plan that swaps out, not yet run."""
        while not (plan := self.plan()).swaps_out:
            self.step(plan)
        return plan

    def until_idle(self) -> list[Plan]:
        plans = []
        while self.engine.has_work:
            plans.append(self.step())
        return plans


def two(**changes: object) -> Bench:
    bench = Bench(**changes)
    bench.add("batch", 10, Lane.BATCH)
    bench.step()
    bench.add("urgent", 9, Lane.CRITICAL)
    return bench


def test_a_swapped_sequence_computes_nothing_again() -> None:
    bench = two()
    bench.until_idle()
    stats = bench.engine.stats()
    assert stats.preemptions == {(Lane.BATCH, PreemptionCause.YIELDED, PreemptionMode.SWAP): 1}
    assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0
    # Of 10 and 9 prompt tokens with 9 output tokens each, all but the last are computed, once.
    assert bench.runner.num_computed == 10 + 9 + 2 * 8
    assert bench.ended == {"batch": Reason.LENGTH, "urgent": Reason.LENGTH}


def test_recompute_computes_again() -> None:
    bench = two(preemption="recompute")
    bench.until_idle()
    stats = bench.engine.stats()
    assert {mode for _, _, mode in stats.preemptions} == {PreemptionMode.RECOMPUTE}
    assert bench.runner.num_computed == 35 + sum(stats.preempted_tokens.values())
    assert stats.swapped_out_blocks == 0


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    bench = two(num_host_blocks=2)
    bench.until_idle()
    stats = bench.engine.stats()
    assert {mode for _, _, mode in stats.preemptions} == {PreemptionMode.RECOMPUTE}
    assert (stats.swap_refusals, stats.used_host_blocks) == (1, 0)


def test_no_host_memory_means_recompute_and_no_refusal() -> None:
    bench = two(num_host_blocks=0)
    bench.until_idle()
    stats = bench.engine.stats()
    assert {mode for _, _, mode in stats.preemptions} == {PreemptionMode.RECOMPUTE}
    assert stats.swap_refusals == 0


def test_the_prefix_cache_comes_first_and_the_host_gives_the_rest() -> None:
    bench = two(prefix_cache=True)
    plans = bench.until_idle()
    stats = bench.engine.stats()
    # Both begin with the same two blocks, and nobody has taken the third of batch's four meanwhile.
    assert stats.prefix_hit_tokens == 8 + 12
    assert (stats.swapped_out_blocks, stats.swapped_in_blocks) == (4, 1)
    assert bench.runner.num_computed == 35 - 8
    assert sum(bool(plan.swaps_in) for plan in plans) == 1


def test_a_displaced_sequence_is_swapped_too() -> None:
    bench = Bench(max_sequences=1)
    bench.add("batch", 10, Lane.BATCH)
    bench.step()
    bench.add("urgent", 3, Lane.CRITICAL)
    plan = bench.step()
    assert [span.sequence.id for span in plan.spans] == ["urgent"]
    assert len(plan.swaps_out) == 3
    bench.until_idle()
    assert bench.runner.num_computed == 10 + 3 + 2 * 8


def test_abort_of_a_swapped_sequence_frees_the_host() -> None:
    bench = two()
    bench.step(bench.until_swapped())
    assert bench.engine.stats().used_host_blocks > 0
    assert bench.engine.abort("batch")
    assert bench.engine.stats().used_host_blocks == 0
    bench.engine.check_integrity()
    bench.until_idle()
    assert bench.ended == {"urgent": Reason.LENGTH}


def test_abort_while_it_is_being_swapped_out() -> None:
    bench = two()
    plan = bench.until_swapped()
    assert bench.engine.abort("batch")
    bench.step(plan)
    assert bench.engine.stats().used_host_blocks == 0
    bench.until_idle()
    assert bench.ended == {"urgent": Reason.LENGTH}


def test_abort_while_it_is_being_swapped_in() -> None:
    bench = two()
    bench.step(bench.until_swapped())
    while not (plan := bench.plan()).swaps_in:
        bench.step(plan)
    assert bench.engine.abort("batch")
    bench.step(plan) if any(s.sequence.id != "batch" for s in plan.spans) else None
    assert "batch" not in bench.ended


@pytest.mark.parametrize("how", ["failed", "not moved"])
def test_a_step_that_copied_nothing_leaves_nothing_on_the_host(how: str) -> None:
    """The victim is not in the failed step: it goes on, and its KV is computed again."""
    bench = two()
    plan = bench.until_swapped()
    if how == "failed":
        ends = bench.engine.fail(plan, Reason.ENGINE_ERROR, "injected")
    else:
        finish = Finish(Reason.ENGINE_ERROR, "injected")
        nothing = StepOutput(((),) * len(plan.spans), {0: finish}, moved=False)
        ends = bench.engine.collect(plan, nothing)
    assert [update.id for update in ends] == ["urgent"]
    bench.engine.check_integrity()
    stats = bench.engine.stats()
    assert (stats.used_host_blocks, sum(stats.waiting.values())) == (0, 1)
    bench.until_idle()
    assert bench.ended == {"batch": Reason.LENGTH}
    assert bench.engine.stats().swapped_in_blocks == 0


def test_a_failure_after_the_copies_keeps_what_was_swapped() -> None:
    bench = two()
    plan = bench.until_swapped()
    output = bench.runner.run(plan)
    failed = replace(output, failures={0: Finish(Reason.OUT_OF_MEMORY, "injected")})
    assert [update.id for update in bench.engine.collect(plan, failed)] == ["urgent"]
    assert bench.engine.stats().used_host_blocks > 0
    bench.until_idle()
    assert bench.ended == {"batch": Reason.LENGTH}
    assert bench.engine.stats().swapped_in_blocks > 0


def test_host_blocks_below_zero_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_host_blocks is -1; allowed: 0 or more"):
        config(num_host_blocks=-1)

from __future__ import annotations

import pytest
from engine.fakes import config, kv_manager

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.scheduling.policies.fcfs import FcfsPolicy
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionCause, PreemptionMode
from penstock.gpu_worker.engine.scheduling.scheduler import Scheduler
from penstock.gpu_worker.engine.sequence import Sequence, SequenceStatus
from penstock.shared.errors import ConfigurationError, IntegrityError
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

RECOMPUTE = PreemptionMode.RECOMPUTE
SWAP = PreemptionMode.SWAP


class Bench:
    """A scheduler, and a model that gives every sampling span one token."""

    def __init__(self, **changes: object) -> None:
        self.config: EngineConfig = config(**{"watermark": 0.0, "prefix_cache": False, **changes})
        self.blocks = kv_manager(self.config)
        self.scheduler = Scheduler(self.config, self.blocks, FcfsPolicy())
        self.live: set[Sequence] = set()

    def add(self, id: str, num_tokens: int, lane: Lane = Lane.NORMAL) -> Sequence:
        first = 1000 * (len(self.live) + 1)
        token_ids = range(first, first + num_tokens)
        seq = Sequence(id=id, prompt_ids=token_ids, options=SamplingOptions(), lane=lane)
        self.live.add(seq)
        self.scheduler.add(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.scheduler.finish(seq)

    def plan(self) -> dict[str, int]:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity(self.live)
        self.last = plan
        return {} if plan is None else {s.sequence.id: s.num_tokens for s in plan.spans}

    def step(self) -> dict[str, int]:
        planned = self.plan()
        if self.last is not None:
            self.compute(self.last)
        return planned

    def compute(self, plan: Plan) -> None:
        for span in plan.spans:
            span.sequence.num_computed_tokens += span.num_tokens
            self.blocks.mark_computed(span.sequence)
            if span.samples:
                span.sequence.token_ids.append(7)


def test_nothing_to_do() -> None:
    assert Bench().scheduler.schedule() is None


def test_a_prompt_is_read_in_chunks_and_the_last_one_samples() -> None:
    bench = Bench(chunk_size=4)
    bench.add("a", 10)
    spans = []
    for _ in range(4):
        bench.step()
        assert bench.last is not None
        spans += [(s.start, s.num_tokens, s.samples) for s in bench.last.spans]
    assert spans == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]


def test_prefills_and_decodes_share_a_step_and_its_token_budget() -> None:
    bench = Bench(max_batch_tokens=10, chunk_size=8)
    bench.add("a", 2)
    assert bench.step() == {"a": 2}
    bench.add("b", 20)
    bench.add("c", 5)
    assert bench.step() == {"a": 1, "b": 8, "c": 1}
    assert bench.step() == {"a": 1, "b": 8, "c": 1}
    assert bench.step() == {"a": 1, "b": 4, "c": 3}
    assert bench.step() == {"a": 1, "b": 1, "c": 1}


def test_no_decode_waits_for_a_more_urgent_prefill() -> None:
    bench = Bench(max_batch_tokens=8, chunk_size=8)
    for id in "abc":
        bench.add(id, 1, Lane.BATCH)
    assert bench.step() == {"a": 1, "b": 1, "c": 1}
    bench.add("urgent", 30, Lane.CRITICAL)
    assert bench.step() == {"a": 1, "b": 1, "c": 1, "urgent": 5}
    assert bench.step() == {"urgent": 5, "a": 1, "b": 1, "c": 1}


def test_even_the_smallest_token_budget_moves_everybody() -> None:
    bench = Bench(max_batch_tokens=3, max_sequences=3, chunk_size=8)
    for id in "abc":
        bench.add(id, 4)
    assert bench.step() == {"a": 3}
    assert bench.step() == {"a": 1, "b": 2}
    assert bench.step() == {"a": 1, "b": 2}
    assert bench.step() == {"a": 1, "b": 1, "c": 1}


def test_the_sequence_budget() -> None:
    bench = Bench(max_sequences=2)
    first = bench.add("a", 1)
    bench.add("b", 1)
    bench.add("c", 1)
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.step() == {"a": 1, "b": 1}
    bench.finish(first)
    assert bench.step() == {"b": 1, "c": 1}


def test_admission_by_lane_then_arrival() -> None:
    bench = Bench(max_sequences=4)
    bench.add("b", 1, Lane.BATCH)
    bench.add("n1", 1)
    bench.add("n2", 1)
    bench.add("c", 1, Lane.CRITICAL)
    bench.add("n3", 1)
    assert list(bench.step()) == ["c", "n1", "n2", "n3"]


def test_nobody_overtakes_the_first_in_line() -> None:
    bench = Bench(num_blocks=8)
    running = bench.add("running", 18)  # 5 of 8 blocks, in chunks of 16
    bench.step()
    bench.add("large", 17)
    bench.add("small", 1)
    bench.add("small batch", 1, Lane.BATCH)
    assert bench.step() == {"running": 2}
    bench.finish(running)
    assert list(bench.step()) == ["large", "small", "small batch"]


def test_admission_needs_only_what_is_known_and_leaves_the_watermark() -> None:
    bench = Bench(num_blocks=10, watermark=0.2)
    bench.add("a", 16)  # 4 blocks; it may well grow to 16
    bench.add("b", 17)  # 5 blocks would leave 1
    assert bench.step() == {"a": 16}
    bench.finish(next(iter(bench.live - {s for s in bench.live if s.id == "b"})))
    bench.add("c", 9)  # 3 blocks leave exactly 2
    assert bench.step() == {"b": 16, "c": 9}


def test_alone_a_sequence_may_take_the_whole_pool() -> None:
    bench = Bench(num_blocks=4, watermark=0.5)
    bench.add("a", 16)
    assert bench.step() == {"a": 16}


def test_the_victim_is_the_least_urgent_and_of_these_the_one_with_least_work() -> None:
    bench = Bench(num_blocks=8, block_size=2)
    for id, num_tokens, lane in [
        ("batch long", 4, Lane.BATCH),
        ("batch short", 2, Lane.BATCH),
        ("normal short", 1, Lane.NORMAL),
        ("critical", 8, Lane.CRITICAL),
    ]:
        bench.add(id, num_tokens, lane)
    assert sum(bench.step().values()) == 15
    assert bench.blocks.num_available == 0
    planned = bench.step()  # critical and both of batch need a block each
    assert planned == {"critical": 1, "normal short": 1}
    assert bench.scheduler.preemptions == {
        (Lane.BATCH, PreemptionCause.EARLIER, RECOMPUTE): 1,  # batch short, for critical
        (Lane.BATCH, PreemptionCause.YIELDED, RECOMPUTE): 1,  # batch long, for itself
    }
    assert bench.scheduler.preempted_tokens == {
        (Lane.BATCH, PreemptionCause.EARLIER, RECOMPUTE): 2,
        (Lane.BATCH, PreemptionCause.YIELDED, RECOMPUTE): 4,
    }


def test_least_work_counts_before_last_admitted() -> None:
    bench = Bench(num_blocks=4, block_size=2)
    bench.add("a", 2)
    short, long = bench.add("short", 1), bench.add("long", 3)
    bench.step()
    assert bench.step() == {"a": 1, "long": 1}
    assert (short.num_preemptions, long.num_preemptions) == (1, 0)


def test_of_equal_victims_the_one_admitted_last() -> None:
    bench = Bench(num_blocks=3, block_size=2)
    bench.add("a", 2)
    second, third = bench.add("b", 1), bench.add("c", 1)
    bench.step()
    assert bench.step() == {"a": 1, "b": 1}
    assert (second.num_preemptions, third.num_preemptions) == (0, 1)


def test_the_less_urgent_never_takes_from_the_more_urgent() -> None:
    bench = Bench(num_blocks=4, block_size=2)
    urgent = bench.add("critical", 1, Lane.CRITICAL)
    batch = bench.add("batch", 6, Lane.BATCH)
    bench.step()
    assert bench.step() == {"critical": 1}
    assert (urgent.num_preemptions, batch.num_preemptions) == (0, 1)
    assert bench.scheduler.preemptions == {(Lane.BATCH, PreemptionCause.YIELDED, RECOMPUTE): 1}


def test_a_preempted_sequence_keeps_its_tokens_and_comes_back_first_in_its_lane() -> None:
    bench = Bench(num_blocks=4, block_size=2, max_sequences=2)
    first = bench.add("a", 4)
    second = bench.add("b", 3)
    bench.step()
    bench.add("c", 1)
    assert bench.step() == {"a": 1}
    assert second.status is SequenceStatus.WAITING
    assert second.token_ids[3:] == [7]
    assert (second.num_computed_tokens, second.block_tables) == (0, ())
    bench.finish(first)
    assert list(bench.step().items()) == [("b", 4), ("c", 1)]
    assert second.token_ids[3:] == [7, 7]


def test_no_admission_in_a_step_that_preempted() -> None:
    """What was just taken from one is not given to it again, though it would fit."""
    bench = Bench(num_blocks=6, block_size=2, prefix_cache=True)
    first, second = bench.add("a", 5), bench.add("b", 5)
    second.token_ids = list(first.token_ids)
    bench.step()
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.step() == {"a": 1}  # it takes one of b's; the rest of b's is in a's, too
    assert bench.blocks.num_available == 2
    assert bench.step() == {"a": 1, "b": 1}


@pytest.mark.parametrize(("num_preemptions", "num_blocks"), [(0, 4), (1, 6), (2, 6)])
def test_who_was_preempted_comes_back_when_all_that_run_can_grow_by_a_block(
    num_preemptions: int, num_blocks: int
) -> None:
    """Two run with a block each; the third needs two blocks, and two more if it was preempted."""
    for missing, comes in [(1, False), (0, True)]:
        bench = Bench(num_blocks=num_blocks - missing, block_size=4)
        for id in "ab":
            bench.add(id, 1)
        bench.step()
        bench.add("c", 5).num_preemptions = num_preemptions
        assert ("c" in bench.step()) == comes


def test_thrash_is_bounded_by_the_guard() -> None:
    """Two that do not fit together take turns per block of growth, not per step."""
    bench = Bench(
        num_blocks=10, block_size=8, max_model_len=100, chunk_size=80, max_batch_tokens=80
    )
    for id in "abc":
        bench.add(id, 24)
    for _ in range(32):
        bench.step()
    assert sum(bench.scheduler.preemptions.values()) <= 32 // 8


def test_hits_are_counted_at_every_admission_and_kept_of_the_first() -> None:
    bench = Bench(prefix_cache=True, block_size=2, num_blocks=5)
    bench.add("a", 4)
    bench.step()
    again = bench.add("b", 4)
    again.token_ids = [7, 7, 7, 7]
    bench.step()
    assert bench.step() == {"a": 1}
    assert (again.num_preemptions, again.num_cached_tokens) == (1, 0)
    bench.finish(next(iter(bench.live - {again})))
    assert bench.step() == {"b": 1}  # its own published blocks
    assert again.num_cached_tokens == 0
    assert (bench.scheduler.prefix_query_tokens, bench.scheduler.prefix_hit_tokens) == (13, 4)


def test_a_finished_sequence_is_gone_wherever_it_was() -> None:
    bench = Bench(max_sequences=1)
    running, waiting = bench.add("a", 5), bench.add("b", 5)
    bench.step()
    bench.finish(waiting)
    bench.finish(running)
    assert bench.plan() == {}
    assert bench.blocks.num_available == bench.blocks.num_blocks


def test_integrity_finds_a_lost_sequence() -> None:
    bench = Bench()
    bench.add("a", 5)
    with pytest.raises(IntegrityError, match="not the live sequences"):
        bench.scheduler.check_integrity(set())
    stranger = Sequence(id="x", prompt_ids=[1], options=SamplingOptions())
    with pytest.raises(IntegrityError, match="not the live sequences"):
        bench.scheduler.check_integrity({*bench.live, stranger})
    bench.scheduler.check_integrity(bench.live)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_batch_tokens": 7}, "max_batch_tokens is 7, below max_sequences"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"watermark": -0.1}, "watermark is -0.1"),
    ],
)
def test_contradicting_limits_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(**changes)

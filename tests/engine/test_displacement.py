"""Urgent work that waits against less urgent work that runs: who goes, and that it helps."""

from __future__ import annotations

from engine.fakes import FakeRunner, PieceStream, config, request
from engine.test_scheduler import RECOMPUTE, Bench

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionCause
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine.sequence import SequenceStatus
from penstock.shared.protocol.states import Lane


def test_urgent_work_takes_the_place_of_less_urgent_work() -> None:
    bench = Bench(max_sequences=2)
    older, younger = bench.add("older", 3, Lane.BATCH), bench.add("younger", 3, Lane.BATCH)
    bench.step()
    bench.finish(older)
    normal = bench.add("normal", 3)
    bench.step()
    urgent = bench.add("urgent", 3, Lane.CRITICAL)
    assert bench.step() == {"normal": 1, "urgent": 3}
    assert younger.status is SequenceStatus.WAITING
    assert bench.scheduler.preemptions == {(Lane.BATCH, PreemptionCause.URGENT, RECOMPUTE): 1}
    bench.add("second", 3, Lane.CRITICAL)
    assert bench.step() == {"urgent": 1, "second": 3}, "then normal work gives way, too"
    bench.add("third", 3, Lane.CRITICAL)
    assert bench.step() == {"urgent": 1, "second": 1}, "but never work as urgent"
    for sequence in (urgent, normal):
        bench.finish(sequence)
    assert bench.step() == {"second": 1, "third": 3}


def test_urgent_work_takes_the_kv_of_less_urgent_work() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    bench.add("batch", 9, Lane.BATCH)
    bench.step()
    bench.add("urgent", 8, Lane.CRITICAL)
    assert bench.step() == {"urgent": 8}


def test_nobody_is_displaced_for_work_that_would_not_fit_even_then() -> None:
    bench = Bench(num_blocks=6, block_size=4)
    bench.add("first", 8, Lane.CRITICAL)
    bench.add("batch", 4, Lane.BATCH)
    bench.step()
    bench.add("large", 18, Lane.CRITICAL)
    assert set(bench.step()) == {"first", "batch"}
    assert not bench.scheduler.preemptions


def test_as_few_as_needed_are_displaced_those_with_least_work_first() -> None:
    bench = Bench(max_sequences=3)
    for name, size in (("much", 9), ("little", 2), ("some", 5)):
        bench.add(name, size, Lane.BATCH)
    bench.step()
    bench.add("urgent", 3)
    assert set(bench.step()) == {"urgent", "much", "some"}


def test_who_shares_its_blocks_with_the_head_is_not_displaced_for_them() -> None:
    bench = Bench(num_blocks=5, prefix_cache=True)
    bench.add("critical", 4, Lane.CRITICAL)
    batch = bench.add("batch", 9, Lane.BATCH)
    bench.step()
    head = bench.add("head", 17)
    head.token_ids[:8] = batch.token_ids[:8]
    # It lacks two blocks. Of the three in the way it counts on two itself.
    assert set(bench.step()) == {"critical", "batch"}
    assert not bench.scheduler.preemptions


def test_what_others_need_to_go_on_is_not_counted_as_free() -> None:
    bench = Bench(num_blocks=6, block_size=2)
    bench.add("a", 2)
    bench.add("batch", 8, Lane.BATCH)
    bench.step()
    bench.add("c", 1)  # there is a block for it, but a needs one to go on, and batch as well
    assert bench.step() == {"a": 1, "c": 1}
    assert bench.scheduler.preemptions == {(Lane.BATCH, PreemptionCause.URGENT, RECOMPUTE): 1}


def test_the_reserve_is_for_those_who_still_run() -> None:
    bench = Bench(num_blocks=5, watermark=0.4)
    bench.add("batch", 5, Lane.BATCH)
    bench.step()
    bench.add("head", 17)  # the whole pool: alone it needs to leave nothing
    assert bench.step() == {"head": 16}


def test_the_head_starts_in_the_step_that_displaces_for_it() -> None:
    """A prompt that is read meanwhile does not use the step's tokens up."""
    bench = Bench(max_sequences=2, max_batch_tokens=4, chunk_size=4)
    bench.add("batch", 2, Lane.BATCH)
    bench.step()
    bench.add("prompt", 40)
    assert bench.step() == {"prompt": 3, "batch": 1}
    bench.add("urgent", 6, Lane.CRITICAL)
    assert bench.step() == {"urgent": 3, "prompt": 1}
    assert bench.step() == {"urgent": 3, "prompt": 1}


def test_without_chunks_nobody_is_displaced_for_a_prompt_that_the_step_cannot_hold() -> None:
    bench = Bench(
        chunking=Chunking.OFF, max_sequences=2, max_model_len=600, max_batch_tokens=602,
        chunk_size=602, num_blocks=400,
    )  # fmt: skip
    bench.add("batch", 2, Lane.BATCH)
    bench.step()
    # Its prompt's logits are asked for, so it is read by 256 tokens in spite of all.
    bench.add("slow", 500).num_prompt_logprobs = 0
    assert bench.step() == {"slow": 256, "batch": 1}
    bench.add("urgent", 400, Lane.CRITICAL)
    assert bench.step() == {"slow": 244, "batch": 1}
    assert not bench.scheduler.preemptions
    assert bench.step() == {"urgent": 400, "slow": 1}


def test_who_was_displaced_does_not_come_back_in_the_same_step() -> None:
    """Though it would fit: what it had computed is in the blocks of another, too."""
    bench = Bench(num_blocks=9, block_size=2, prefix_cache=True)
    first, second = bench.add("a", 7, Lane.BATCH), bench.add("b", 7, Lane.BATCH)
    second.token_ids = list(first.token_ids)
    bench.step()
    bench.add("urgent", 3)
    assert bench.step() == {"urgent": 3, "a": 1}
    assert second.status is SequenceStatus.WAITING
    assert bench.blocks.num_available == 3


def test_nobody_is_displaced_for_blocks_that_have_left_a_window() -> None:
    """A sequence gives them up when it fills its next one, or when somebody is short of them."""
    cfg = config(
        num_blocks=8,
        more_kv_cache_groups=(KVCacheGroup(4, window=4),),
        chunk_size=4,
        watermark=0.0,
        prefix_cache=False,
    )
    engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size, cfg.kv_cache_groups)
    engine.add(request("batch", [1] * 13, lane=Lane.BATCH, max_tokens=9))
    for _ in range(6):
        plan = engine.schedule()
        assert plan is not None
        engine.collect(plan, runner.run(plan))
    assert [pool.used_blocks for pool in engine.stats().pools] == [4, 2]
    engine.add(request("urgent", [2] * 9, max_tokens=9))
    plan = engine.schedule()
    assert plan is not None
    assert {span.sequence.id for span in plan.spans} == {"urgent", "batch"}
    assert not engine.stats().preemptions
    engine.check_integrity()
    while plan:
        engine.collect(plan, runner.run(plan))
        engine.check_integrity()
        plan = engine.schedule()

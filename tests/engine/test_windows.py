"""KVManager that left the window of their layers: given up, found again, and never missed."""

from __future__ import annotations

import sys

import pytest
from engine.fakes import FakeRunner, PieceStream, Result, config, request, solo
from engine.test_blocks import manager
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import NO_BLOCK, KVCacheGroup, most_blocks_held
from penstock.gpu_worker.engine.kv.kv_manager import KVManager
from penstock.gpu_worker.engine.plan import BlockCopy
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.errors import ConfigurationError, IntegrityError
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason

FOREVER = 600
"""Output tokens of a sequence that outgrows every pool here many times."""


def sequence(token_ids: list[int], id: str = "s") -> Sequence:
    return Sequence(id=id, prompt_ids=token_ids, options=SamplingOptions())


def advance(blocks: KVManager, seq: Sequence, stop: int, step: int = 1) -> None:
    """Compute up to ``stop`` as the engine does, ``step`` tokens at a time."""
    while seq.num_computed_tokens < stop:
        start = seq.num_computed_tokens
        end = min(start + step, stop)
        assert blocks.try_reserve(seq, end, list[BlockCopy]())
        seq.num_computed_tokens = end
        if end - start > 1 or end % blocks.block_size == 0:
            blocks.mark_computed(seq)


def admitted(blocks: KVManager, token_ids: list[int], computed: int = 0) -> Sequence:
    seq = sequence(token_ids)
    assert blocks.try_admit(seq, 0)
    advance(blocks, seq, computed)
    return seq


def hit(blocks: KVManager, token_ids: list[int]) -> int:
    """Tokens of a prompt that the prefix cache would give; leaves no trace."""
    seq = admitted(blocks, token_ids)
    num_cached = seq.num_computed_tokens
    blocks.release(seq)
    return num_cached


def test_a_block_goes_when_the_next_token_does_not_see_it() -> None:
    blocks = manager(8, 2, window=4)
    seq, gone = admitted(blocks, list(range(14))), []
    for stop in range(2, 14, 2):
        advance(blocks, seq, stop)
        gone.append(seq.block_tables[0].count(NO_BLOCK))
        blocks.check_integrity([seq])
    # Position 4 sees 1 to 3 before it: block 0 stays. Position 6 sees 3 to 5: block 0 goes.
    assert gone == [0, 0, 1, 2, 3, 4]
    assert blocks.num_used == len(seq.block_tables[0]) - 4


def test_a_long_prompt_takes_only_what_it_can_hold_at_the_same_time() -> None:
    blocks = manager(16, 4, window=8, max_span=6)
    seq = admitted(blocks, list(range(1000)))
    assert len(seq.block_tables[0]) == most_blocks_held(8, 6, 4) == 5
    most = 0
    for stop in range(6, 1000, 6):
        advance(blocks, seq, stop, step=6)
        most = max(most, blocks.num_used)
    assert most == 5


@settings(deadline=None)
@given(
    window=st.integers(1, 9),
    size=st.integers(1, 5),
    max_span=st.integers(1, 7),
    spans=st.lists(st.integers(1, 7), min_size=20, max_size=40),
)
def test_the_most_a_sequence_can_hold_is_enough_for_one_of_any_length(
    window: int, size: int, max_span: int, spans: list[int]
) -> None:
    most = most_blocks_held(window, max_span, size)
    blocks = manager(most, size, window=window, max_span=max_span)
    assert blocks.capacity_tokens == sys.maxsize
    seq = admitted(blocks, [0] * 300)
    for span in spans:
        advance(blocks, seq, seq.num_computed_tokens + min(span, max_span), step=max_span)
    if most > 1:
        short = manager(most - 1, size, window=window, max_span=max_span)
        assert short.capacity_tokens == (most - 1) * size


def test_a_hit_needs_its_window_and_nothing_before() -> None:
    blocks = manager(20, 2, window=4)
    seq = admitted(blocks, list(range(14)))
    advance(blocks, seq, 8)
    blocks.mark_computed(seq)
    assert seq.block_tables[0][:2] == [NO_BLOCK] * 2
    other = admitted(blocks, [*range(8), 99])
    assert (other.num_computed_tokens, other.block_tables[0][:2]) == (8, [NO_BLOCK] * 2)
    assert other.block_tables[0][2:4] == seq.block_tables[0][2:4]
    blocks.check_integrity([seq, other])


def test_what_left_the_window_first_is_evicted_first() -> None:
    blocks = manager(6, 2, window=4)
    seq = admitted(blocks, list(range(10)))
    advance(blocks, seq, 10)
    blocks.release(seq)
    assert blocks.num_cached == 5
    small = admitted(blocks, [70, 71, 72, 73])  # the free block, and one cached
    assert blocks.num_evictions == 1
    blocks.release(small)
    # Position 4 sees 1 to 3, and block 0 is gone; position 6 sees 3 to 5.
    seq = sequence([*range(10), 99])
    assert [blocks.pools[0].num_hit_blocks(seq, limit) for limit in (2, 3, 4, 5)] == [0, 3, 4, 5]


def grouped(*groups: KVCacheGroup, max_span: int = 20) -> KVManager:
    return KVManager(groups, 2, prefix_cache=True, max_span=max_span)


def test_a_prefix_is_hit_where_all_groups_can_go_on() -> None:
    blocks = grouped(KVCacheGroup(20), KVCacheGroup(20, 5), KVCacheGroup(20, 3))
    seq = admitted(blocks, list(range(17)))
    advance(blocks, seq, 16, step=16)
    prompt = [*range(16), 99]
    assert hit(blocks, prompt) == 16
    _, wide, narrow = blocks.pools
    for pool, block in ((wide, 7), (narrow, 6), (wide, 4)):
        lost = pool.hit_blocks(sequence(prompt), block + 1)[block]
        pool._cache.forget(lost)  # type: ignore[union-attr]
    # Without its block 7 the wide one offers 7 blocks; without its 6 the narrow one 6; behind 6
    # the wide one would need its block 4, so it offers 4; and there all three can go on.
    assert [pool.num_hit_blocks(sequence(prompt), 8) for pool in blocks.pools] == [8, 7, 8]
    assert hit(blocks, prompt) == 8


def test_admission_takes_blocks_of_all_pools_or_of_none() -> None:
    blocks = grouped(KVCacheGroup(8), KVCacheGroup(6, 2), max_span=4)
    seq = sequence(list(range(8)))
    held = admitted(blocks, [50, 51])
    for spare, fits in ((2, False), (1, True)):
        before = [pool.num_available for pool in blocks.pools]
        assert blocks.try_admit(seq, spare) == fits
        if not fits:
            assert [pool.num_available for pool in blocks.pools] == before
            assert not seq.block_tables
    assert list(map(len, seq.block_tables)) == [4, 4]
    blocks.check_integrity([seq, held])


def test_a_reservation_takes_blocks_of_all_pools_or_of_none() -> None:
    blocks = grouped(KVCacheGroup(8), KVCacheGroup(4, 2), max_span=1)
    seq, other = admitted(blocks, [0, 1], 2), admitted(blocks, [5, 6], 2)
    assert blocks.try_reserve(seq, 4, [])
    assert blocks.try_reserve(other, 4, [])
    before = [pool.num_available for pool in blocks.pools]
    assert before == [4, 0]
    assert not blocks.try_reserve(seq, 5, [])
    assert [pool.num_available for pool in blocks.pools] == before


def test_a_fork_copies_the_block_of_every_group() -> None:
    blocks = grouped(KVCacheGroup(20), KVCacheGroup(20, 3))
    parent = admitted(blocks, list(range(9)), 9)
    child = sequence(list(range(9)), "child")
    blocks.fork(parent, child)
    assert child.block_tables == parent.block_tables
    assert child.block_tables[1][:3] == [NO_BLOCK] * 3
    copies = list[BlockCopy]()
    assert blocks.try_reserve(child, 10, copies)
    assert copies == [
        BlockCopy(parent.block_tables[0][4], child.block_tables[0][4], 0),
        BlockCopy(parent.block_tables[1][4], child.block_tables[1][4], 1),
    ]
    blocks.check_integrity([parent, child])


def test_as_many_victims_as_the_scarcest_pool_needs() -> None:
    blocks = grouped(KVCacheGroup(20), KVCacheGroup(6, 8), max_span=2)
    victims = [admitted(blocks, [10 * i, 1, 2, 3]) for i in range(3)]
    head = sequence(list(range(50, 58)))

    def needed(victims: list[Sequence]) -> int | None:
        return blocks.victims_needed(head, victims, lambda gone: 0, lambda: running)

    running = dict.fromkeys(victims, 4)
    each = [
        pool.victims_needed(head, [], victims, lambda gone: 0, lambda: running)
        for pool in blocks.pools
    ]
    assert each == [0, 2]
    assert needed(victims) == 2
    assert needed(victims[:1]) is None


def test_integrity_finds_lost_windows() -> None:
    blocks = grouped(KVCacheGroup(20), KVCacheGroup(20, 5))
    seq = admitted(blocks, list(range(16)), 12)
    blocks.check_integrity([seq])
    table = seq.block_tables[1]
    first = table.count(NO_BLOCK)
    held = list(table)
    table[first] = NO_BLOCK
    with pytest.raises(IntegrityError, match="a block in its window is gone"):
        blocks.check_integrity([seq])
    table[:] = held
    table[first - 1] = 19
    with pytest.raises(IntegrityError, match="blocks that left its window are still in"):
        blocks.check_integrity([seq])
    table[:] = held
    table[first + 1] = NO_BLOCK
    with pytest.raises(IntegrityError, match="in the middle is gone"):
        blocks.check_integrity([seq])
    seq.block_tables = seq.block_tables[:1]
    with pytest.raises(IntegrityError, match="lacks the block table of a KV cache group"):
        blocks.check_integrity([seq])


@pytest.mark.parametrize("more_kv_cache_groups", [(), (KVCacheGroup(9, 3),)])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_sequences_outgrow_their_pool_many_times(
    more_kv_cache_groups: tuple[KVCacheGroup, ...], prefix_cache: bool
) -> None:
    cfg = config(
        num_blocks=18,
        window=11,
        more_kv_cache_groups=more_kv_cache_groups,
        chunk_size=6,
        max_model_len=1000,
        prefix_cache=prefix_cache,
    )
    engine, runner, most = Engine(cfg, PieceStream), FakeRunner(4, cfg.kv_cache_groups), 0
    requests = [request(str(i), range(1, 3 + i), max_tokens=FOREVER) for i in range(3)]
    outputs: dict[str, list[int]] = {req.id: [] for req in requests}
    texts: dict[str, str] = dict.fromkeys(outputs, "")
    for req in requests:
        assert engine.add(req) is None
    while plan := engine.schedule():
        for update in engine.collect(plan, runner.run(plan)):
            outputs[update.id] += update.token_ids
            texts[update.id] += update.text
        engine.check_integrity()
        most = max(most, max(pool.used_blocks for pool in engine.stats().pools))
    for req in requests:
        result = Result(tuple(outputs[req.id]), texts[req.id], Reason.LENGTH)
        assert result == solo(req, cfg)
    assert most <= 3 * most_blocks_held(11, 6, 4)
    assert not engine.stats().preemptions


def test_a_pool_below_one_window_refuses_with_its_numbers() -> None:
    cfg = config(num_blocks=64, more_kv_cache_groups=(KVCacheGroup(4, 20),), chunk_size=8)
    engine = Engine(cfg, PieceStream)
    update = engine.add(request("r", [1] * 17))
    assert update is not None
    assert update.finish is not None
    assert update.finish.reason is Reason.OUT_OF_MEMORY
    assert update.finish.message == (
        "17 tokens need 5 KV blocks of 4 tokens in layers with a window of 20 tokens; the pool "
        "has 4 (16 tokens): raise the KV memory budget or ask for less"
    )
    assert engine.add(request("s", [1] * 16)) is None


def test_the_statistics_tell_of_each_pool() -> None:
    cfg = config(
        num_blocks=20, more_kv_cache_groups=(KVCacheGroup(8, 5),), chunk_size=8, prefix_cache=False
    )
    engine, runner = Engine(cfg, PieceStream), FakeRunner(4, cfg.kv_cache_groups)
    engine.add(request("r", [1] * 30, max_tokens=20))
    for _ in range(6):
        plan = engine.schedule()
        assert plan is not None
        engine.collect(plan, runner.run(plan))
    stats = engine.stats()
    assert [(pool.window, pool.num_blocks) for pool in stats.pools] == [(None, 20), (5, 8)]
    assert [pool.used_blocks for pool in stats.pools] == [8, 1]
    assert stats.num_blocks == stats.used_blocks + stats.cached_blocks + stats.free_blocks == 28
    # One more sequence of any length fits beside it into the window's pool; 12 blocks are left.
    assert stats.available_tokens == 12 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"more_kv_cache_groups": (KVCacheGroup(3, -1),)}, "window is -1"),
        ({"more_kv_cache_groups": (KVCacheGroup(0, 4),)}, "num_blocks is 0"),
    ],
)
def test_pools_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(**changes)

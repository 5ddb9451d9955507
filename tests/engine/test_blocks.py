from __future__ import annotations

from typing import Any

import pytest

from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.kv.kv_manager import KVManager
from penstock.gpu_worker.engine.plan import BlockCopy
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.sampling_options import SamplingOptions

OPTIONS = SamplingOptions()


def manager(
    num_blocks: int, block_size: int, *, window: int | None = None, **options: Any
) -> KVManager:
    """A manager of one pool."""
    return KVManager([KVCacheGroup(num_blocks, window)], block_size, **options)


def sequence(token_ids: list[int], id: str = "s", salt: bytes = b"") -> Sequence:
    return Sequence(id=id, prompt_ids=token_ids, options=OPTIONS, cache_salt=salt)


def computed(blocks: KVManager, seq: Sequence, num_tokens: int | None = None) -> Sequence:
    seq.num_computed_tokens = seq.num_tokens if num_tokens is None else num_tokens
    blocks.mark_computed(seq)
    return seq


def admitted(blocks: KVManager, token_ids: list[int], id: str = "s") -> Sequence:
    seq = sequence(token_ids, id)
    assert blocks.try_admit(seq, 0)
    return seq


def test_counts() -> None:
    blocks = manager(8, 4)
    assert [blocks.pools[0].blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    seq = computed(blocks, admitted(blocks, list(range(9))))
    assert (blocks.num_used, blocks.num_cached, blocks.num_available) == (3, 0, 5)
    blocks.release(seq)
    assert (blocks.num_used, blocks.num_cached, blocks.num_available) == (0, 2, 8)
    assert (seq.block_tables, seq.num_computed_tokens) == ((), 0)


def test_admission_is_all_or_nothing_and_leaves_the_spare() -> None:
    blocks = manager(4, 4)
    seq = sequence(list(range(9)))
    assert not blocks.try_admit(seq, 2)
    assert (seq.block_tables, blocks.num_available) == ((), 4)
    assert blocks.try_admit(seq, 1)
    assert len(seq.block_tables[0]) == 3


def test_a_hit_gives_the_same_blocks_and_counts_as_computed() -> None:
    blocks = manager(8, 4)
    first = computed(blocks, admitted(blocks, list(range(10)), "first"))
    second = admitted(blocks, [*range(8), 99, 98], "second")
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert second.block_tables[0][2] != first.block_tables[0][2]
    assert second.num_computed_tokens == 8
    blocks.check_integrity([first, second])


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks = manager(8, 4)
    computed(blocks, admitted(blocks, list(range(8)), "first"))
    assert admitted(blocks, list(range(8)), "same").num_computed_tokens == 4
    assert admitted(blocks, list(range(9)), "longer").num_computed_tokens == 8


def test_only_computed_blocks_are_published() -> None:
    blocks = manager(8, 4)
    first = admitted(blocks, list(range(12)), "first")
    computed(blocks, first, 7)
    assert admitted(blocks, list(range(12)), "second").num_computed_tokens == 4


def test_a_block_after_a_different_one_is_a_different_block() -> None:
    blocks = manager(16, 4)
    computed(blocks, admitted(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 3], "first"))
    assert admitted(blocks, [2, 2, 2, 2, 3], "no chain").num_computed_tokens == 0
    assert admitted(blocks, [0, 1, 1, 1, 2, 2, 2, 2, 3], "other").num_computed_tokens == 0


def test_prefixes_are_shared_only_within_a_salt() -> None:
    blocks = manager(16, 4)
    for salt in (b"", b"a", b"b"):
        seq = sequence(list(range(9)), "first", salt)
        assert blocks.try_admit(seq, 0)
        assert seq.num_computed_tokens == 0
        computed(blocks, seq)
        again = sequence(list(range(9)), "again", salt)
        assert blocks.try_admit(again, 0)
        assert again.num_computed_tokens == 8


def test_without_prefix_cache_nothing_is_kept() -> None:
    blocks = manager(8, 4, prefix_cache=False)
    blocks.release(computed(blocks, admitted(blocks, list(range(9)))))
    assert blocks.num_cached == 0
    assert admitted(blocks, list(range(9))).num_computed_tokens == 0


def test_eviction_takes_the_least_recently_used_and_of_it_the_end_of_the_prefix() -> None:
    blocks = manager(5, 2)
    old = computed(blocks, admitted(blocks, [1, 1, 2, 2], "old"))
    new = computed(blocks, admitted(blocks, [3, 3, 4, 4], "new"))
    blocks.release(old)
    blocks.release(new)
    assert (blocks.num_cached, blocks.num_evictions) == (4, 0)
    other = admitted(blocks, [9, 9, 9], "other")  # the free block and one cached
    assert blocks.num_evictions == 1
    blocks.release(other)
    assert admitted(blocks, [1, 1, 2, 2, 0], "old again").num_computed_tokens == 2
    assert admitted(blocks, [3, 3, 4], "new again").num_computed_tokens == 2


def test_a_hit_block_is_not_evicted_for_the_very_sequence_that_hit_it() -> None:
    blocks = manager(3, 2)
    blocks.release(computed(blocks, admitted(blocks, [1, 1, 2, 2, 3, 3])))
    assert blocks.num_cached == 3
    seq = admitted(blocks, [1, 1, 2, 2, 4, 4])
    assert seq.num_computed_tokens == 4
    assert blocks.num_evictions == 1
    blocks.check_integrity([seq])


def test_revived_blocks_count_against_what_is_available() -> None:
    blocks = manager(3, 2)
    blocks.release(computed(blocks, admitted(blocks, [1, 1, 2, 2])))
    seq = sequence([1, 1, 2, 2, 3, 3, 4, 4])
    assert not blocks.try_admit(seq, 0)
    assert (blocks.num_cached, blocks.num_available) == (2, 3)


def test_reserving_is_all_or_nothing() -> None:
    blocks = manager(3, 2)
    seq, copies = admitted(blocks, [1, 2]), list[BlockCopy]()
    assert blocks.try_reserve(computed(blocks, seq), 2, copies)
    assert not blocks.try_reserve(seq, 7, copies)
    assert len(seq.block_tables[0]) == 1
    assert blocks.try_reserve(seq, 6, copies)
    assert len(seq.block_tables[0]) == 3
    assert copies == []


def test_the_first_to_write_into_a_shared_block_copies_it_the_last_does_not() -> None:
    blocks = manager(8, 4)
    parent = computed(blocks, admitted(blocks, list(range(6)), "parent"))
    child = sequence(list(range(6)), "child")
    blocks.fork(parent, child)
    assert child.block_tables[0] == parent.block_tables[0]
    assert blocks.num_used == 2
    shared, copies = parent.block_tables[0][1], list[BlockCopy]()
    assert blocks.try_reserve(child, 7, copies)
    assert copies == [BlockCopy(source=shared, target=child.block_tables[0][1])]
    assert blocks.try_reserve(parent, 7, copies)
    assert (len(copies), parent.block_tables[0][1]) == (1, shared)
    assert parent.block_tables[0][0] == child.block_tables[0][0]
    blocks.check_integrity([parent, child])


def test_a_copy_needs_a_block() -> None:
    blocks = manager(1, 4)
    parent = computed(blocks, admitted(blocks, [1, 2], "parent"))
    child, copies = sequence([1, 2], "child"), list[BlockCopy]()
    blocks.fork(parent, child)
    assert not blocks.try_reserve(child, 3, copies)
    assert copies == []
    blocks.release(parent)
    assert blocks.try_reserve(child, 3, copies)
    assert copies == []


def test_a_fork_does_not_share_what_is_not_computed() -> None:
    blocks = manager(8, 2)
    parent = computed(blocks, admitted(blocks, list(range(8)), "parent"), 3)
    child = sequence(list(range(3)), "child")
    blocks.fork(parent, child)
    assert child.block_tables[0] == parent.block_tables[0][:2]


def test_integrity_finds_what_is_wrong() -> None:
    blocks = manager(8, 4)
    seq = computed(blocks, admitted(blocks, list(range(9))))
    blocks.check_integrity([seq])
    with pytest.raises(IntegrityError, match="0 owners"):
        blocks.check_integrity([])
    with pytest.raises(IntegrityError, match="2 owners"):
        blocks.check_integrity([seq, seq])
    seq.num_computed_tokens = 3
    with pytest.raises(IntegrityError, match="published too early"):
        blocks.check_integrity([seq])
    seq.num_computed_tokens = 9
    seq.block_tables[0][1] = seq.block_tables[0][0]
    with pytest.raises(IntegrityError, match="stands twice"):
        blocks.check_integrity([seq])

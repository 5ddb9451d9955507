from __future__ import annotations

import pytest
from engine.fakes import FakeKV, config, tags
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gpu_worker.engine import NO_BLOCK, BlockCopy, BlockManager, KVKind, Sequence
from penstock.gpu_worker.engine.hybrid_blocks import make_blocks
from penstock.gpu_worker.engine.kinds import most_blocks_held
from penstock.shared.errors import IntegrityError
from penstock.shared.protocol import SamplingOptions

OPTIONS = SamplingOptions()


def sequence(token_ids: list[int], id: str = "s", salt: bytes = b"") -> Sequence:
    return Sequence(id=id, prompt_ids=token_ids, options=OPTIONS, cache_salt=salt)


def computed(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> Sequence:
    seq.num_computed_tokens = seq.num_tokens if num_tokens is None else num_tokens
    blocks.settle(seq)
    return seq


def admitted(blocks: BlockManager, token_ids: list[int], id: str = "s") -> Sequence:
    seq = sequence(token_ids, id)
    assert blocks.try_admit(seq, 0)
    return seq


def test_counts() -> None:
    blocks = BlockManager(8, 4)
    assert [blocks.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    seq = computed(blocks, admitted(blocks, list(range(9))))
    assert (blocks.num_used, blocks.num_cached, blocks.num_available) == (3, 0, 5)
    blocks.release(seq)
    assert (blocks.num_used, blocks.num_cached, blocks.num_available) == (0, 2, 8)
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)


def test_admission_is_all_or_nothing_and_leaves_the_spare() -> None:
    blocks = BlockManager(4, 4)
    seq = sequence(list(range(9)))
    assert not blocks.try_admit(seq, 2)
    assert (seq.block_table, blocks.num_available) == ([], 4)
    assert blocks.try_admit(seq, 1)
    assert len(seq.block_table) == 3


def test_a_hit_gives_the_same_blocks_and_counts_as_computed() -> None:
    blocks = BlockManager(8, 4)
    first = computed(blocks, admitted(blocks, list(range(10)), "first"))
    second = admitted(blocks, [*range(8), 99, 98], "second")
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == 8
    blocks.check_integrity([first, second])


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks = BlockManager(8, 4)
    computed(blocks, admitted(blocks, list(range(8)), "first"))
    assert admitted(blocks, list(range(8)), "same").num_computed_tokens == 4
    assert admitted(blocks, list(range(9)), "longer").num_computed_tokens == 8


def test_only_computed_blocks_are_published() -> None:
    blocks = BlockManager(8, 4)
    first = admitted(blocks, list(range(12)), "first")
    computed(blocks, first, 7)
    assert admitted(blocks, list(range(12)), "second").num_computed_tokens == 4


def test_a_block_after_a_different_one_is_a_different_block() -> None:
    blocks = BlockManager(16, 4)
    computed(blocks, admitted(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 3], "first"))
    assert admitted(blocks, [2, 2, 2, 2, 3], "no chain").num_computed_tokens == 0
    assert admitted(blocks, [0, 1, 1, 1, 2, 2, 2, 2, 3], "other").num_computed_tokens == 0


def test_prefixes_are_shared_only_within_a_salt() -> None:
    blocks = BlockManager(16, 4)
    for salt in (b"", b"a", b"b"):
        seq = sequence(list(range(9)), "first", salt)
        assert blocks.try_admit(seq, 0)
        assert seq.num_computed_tokens == 0
        computed(blocks, seq)
        again = sequence(list(range(9)), "again", salt)
        assert blocks.try_admit(again, 0)
        assert again.num_computed_tokens == 8


def test_without_prefix_cache_nothing_is_kept() -> None:
    blocks = BlockManager(8, 4, prefix_cache=False)
    blocks.release(computed(blocks, admitted(blocks, list(range(9)))))
    assert blocks.num_cached == 0
    assert admitted(blocks, list(range(9))).num_computed_tokens == 0


def test_eviction_takes_the_least_recently_used_and_of_it_the_end_of_the_prefix() -> None:
    blocks = BlockManager(5, 2)
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
    blocks = BlockManager(3, 2)
    blocks.release(computed(blocks, admitted(blocks, [1, 1, 2, 2, 3, 3])))
    assert blocks.num_cached == 3
    seq = admitted(blocks, [1, 1, 2, 2, 4, 4])
    assert seq.num_computed_tokens == 4
    assert blocks.num_evictions == 1
    blocks.check_integrity([seq])


def test_revived_blocks_count_against_what_is_available() -> None:
    blocks = BlockManager(3, 2)
    blocks.release(computed(blocks, admitted(blocks, [1, 1, 2, 2])))
    seq = sequence([1, 1, 2, 2, 3, 3, 4, 4])
    assert not blocks.try_admit(seq, 0)
    assert (blocks.num_cached, blocks.num_available) == (2, 3)


def test_reserving_is_all_or_nothing() -> None:
    blocks = BlockManager(3, 2)
    seq, copies = admitted(blocks, [1, 2]), list[BlockCopy]()
    assert blocks.try_reserve(computed(blocks, seq), 2, copies)
    assert not blocks.try_reserve(seq, 7, copies)
    assert len(seq.block_table) == 1
    assert blocks.try_reserve(seq, 6, copies)
    assert len(seq.block_table) == 3
    assert copies == []


def test_the_first_to_write_into_a_shared_block_copies_it_the_last_does_not() -> None:
    blocks = BlockManager(8, 4)
    parent = computed(blocks, admitted(blocks, list(range(6)), "parent"))
    child = sequence(list(range(6)), "child")
    blocks.fork(parent, child)
    assert child.block_table == parent.block_table
    assert blocks.num_used == 2
    shared, copies = parent.block_table[1], list[BlockCopy]()
    assert blocks.try_reserve(child, 7, copies)
    assert copies == [BlockCopy(source=shared, target=child.block_table[1])]
    assert blocks.try_reserve(parent, 7, copies)
    assert (len(copies), parent.block_table[1]) == (1, shared)
    assert parent.block_table[0] == child.block_table[0]
    blocks.check_integrity([parent, child])


def test_a_copy_needs_a_block() -> None:
    blocks = BlockManager(1, 4)
    parent = computed(blocks, admitted(blocks, [1, 2], "parent"))
    child, copies = sequence([1, 2], "child"), list[BlockCopy]()
    blocks.fork(parent, child)
    assert not blocks.try_reserve(child, 3, copies)
    assert copies == []
    blocks.release(parent)
    assert blocks.try_reserve(child, 3, copies)
    assert copies == []


def test_a_fork_does_not_share_what_is_not_computed() -> None:
    blocks = BlockManager(8, 2)
    parent = computed(blocks, admitted(blocks, list(range(8)), "parent"), 3)
    child = sequence(list(range(3)), "child")
    blocks.fork(parent, child)
    assert child.block_table == parent.block_table[:2]


def test_integrity_finds_what_is_wrong() -> None:
    blocks = BlockManager(8, 4)
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
    seq.block_table[1] = seq.block_table[0]
    with pytest.raises(IntegrityError, match="stands twice"):
        blocks.check_integrity([seq])


MAX_SPAN = 5
pools = st.integers(1, 10)
kinds = st.one_of(
    st.builds(KVKind, pools).map(lambda kind: [kind]),
    st.builds(KVKind, pools, st.integers(1, 5)).map(lambda kind: [kind]),
    st.tuples(
        st.builds(KVKind, pools, st.none() | st.just(6)),
        st.builds(KVKind, pools, st.integers(1, 5)),
        st.builds(KVKind, pools, st.just(2)),
    ).flatmap(lambda three: st.sampled_from([list(three), list(three[:2])])),
)


def tables(seq: Sequence) -> tuple[list[int], ...]:
    return (seq.block_table, *seq.more_tables)


class BlockMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go; their memory must always hold their own tokens."""

    @initialize(kinds=kinds, size=st.integers(1, 4), prefix_cache=st.booleans())
    def build(self, kinds: list[KVKind], size: int, prefix_cache: bool) -> None:
        cfg = config(
            block_size=size,
            num_blocks=kinds[0].num_blocks,
            window=kinds[0].window,
            more_kinds=tuple(kinds[1:]),
            prefix_cache=prefix_cache,
            chunk_size=MAX_SPAN,
        )
        self.blocks = make_blocks(cfg)
        self.kv = FakeKV(size, kinds)
        self.live: list[Sequence] = []
        self.num_made = 0

    def new(self, token_ids: list[int], salt: bytes) -> Sequence:
        self.num_made += 1
        return sequence(token_ids, f"s{self.num_made}", salt)

    def needed(self, num_tokens: int) -> list[int]:
        """Most blocks of each kind that a sequence of this length may hold."""
        return [
            -(-num_tokens // kind.block_size)
            if kind.window is None
            else min(
                -(-num_tokens // kind.block_size),
                most_blocks_held(kind.window, MAX_SPAN, kind.block_size),
            )
            for kind in self.blocks.kinds
        ]

    def held(self, seq: Sequence) -> list[int]:
        return [len(table) - table.count(NO_BLOCK) for table in tables(seq)]

    def available(self) -> list[int]:
        return [kind.num_available for kind in self.blocks.kinds]

    def write(self, seq: Sequence, stop: int, copies: list[BlockCopy]) -> None:
        self.kv.copy(copies)
        known = tags(seq.token_ids[:stop], seq.cache_salt)
        for position in range(seq.num_computed_tokens, stop):
            for kind in range(len(self.blocks.kinds)):
                block = tables(seq)[kind][position // self.blocks.block_size]
                owners = [other for other in self.live if block in tables(other)[kind]]
                assert owners == [seq], f"{seq} writes block {block} of {owners}"
            self.kv.write(seq, position, known[position])
        self.kv.read(seq, seq.num_computed_tokens, stop)
        seq.num_computed_tokens = stop

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12)
        | st.integers(1, 24).map(lambda length: [0] * length),
        salt=st.sampled_from([b"", b"x"]),
        spare=st.integers(0, 2),
    )
    def admit(self, token_ids: list[int], salt: bytes, spare: int) -> None:
        before = self.available()
        seq = self.new(token_ids, salt)
        if self.blocks.try_admit(seq, spare):
            assert self.available()[0] >= spare
            assert seq.num_computed_tokens < seq.num_tokens
            assert max(self.held(seq)) <= self.blocks.kinds[0].blocks_for(seq.num_tokens)
            self.live.append(seq)
        else:
            needed = self.needed(seq.num_tokens)
            share = [-(-spare * k.num_blocks // self.blocks.kinds[0].num_blocks)
                     for k in self.blocks.kinds]  # fmt: skip
            assert any(b < n + s for b, n, s in zip(before, needed, share, strict=True))
            assert (seq.block_table, self.available()) == ([], before)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_new: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        seq.token_ids += data.draw(st.lists(st.integers(0, 1), min_size=num_new, max_size=num_new))
        if seq.num_computed_tokens == seq.num_tokens:
            return
        start = seq.num_computed_tokens
        stop = data.draw(st.integers(start + 1, min(seq.num_tokens, start + MAX_SPAN)))
        copies, before = list[BlockCopy](), ([list(t) for t in tables(seq)], self.available())
        if self.blocks.try_reserve(seq, stop, copies):
            held = self.held(seq)
            assert all(h <= n for h, n in zip(held, self.needed(seq.num_tokens), strict=True))
            self.write(seq, stop, copies)
            if stop - start > 1 or stop % self.blocks.block_size == 0:  # as the engine does
                self.blocks.settle(seq)
        else:
            alone = len(self.live) == 1
            assert not alone or seq.num_tokens > self.blocks.capacity_tokens
            assert (copies, ([list(t) for t in tables(seq)], self.available())) == ([], before)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = self.new(parent.token_ids[: max(parent.num_computed_tokens, 1)], parent.cache_salt)
        self.blocks.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
          spare=st.integers(0, 2))  # fmt: skip
    def displace(self, data: st.DataObject, token_ids: list[int], spare: int) -> None:
        """What is counted as enough is enough: for the new one, and for those who go on."""
        head = self.new(token_ids, b"")
        victims = data.draw(st.lists(st.sampled_from(self.live), unique=True, max_size=3))
        stops = {
            seq: data.draw(st.integers(start, min(seq.num_tokens, start + MAX_SPAN)))
            for seq in self.live
            if (start := seq.num_computed_tokens) >= 0
        }
        self.blocks.reclaim(self.live)
        spares = [spare + len(victims) - gone for gone in range(len(victims) + 1)]
        count = self.blocks.victims_needed(head, victims, spares.__getitem__, lambda: stops)
        if count is None:
            return
        for victim in victims[:count]:
            self.live.remove(victim)
            self.blocks.release(victim)
        assert self.blocks.try_admit(head, spares[count])
        self.live.append(head)
        for seq in self.live[:-1]:
            if stops[seq] > seq.num_computed_tokens:
                copies = list[BlockCopy]()
                assert self.blocks.try_reserve(seq, stops[seq], copies)
                self.write(seq, stops[seq], copies)
                self.blocks.settle(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        self.blocks.reclaim(data.draw(st.lists(st.sampled_from(self.live), unique=True)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.blocks.release(seq)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.live)

    @invariant()
    def everyone_reads_its_own_tokens(self) -> None:
        for seq in getattr(self, "live", ()):
            self.kv.read(seq, seq.num_computed_tokens, seq.num_computed_tokens)

    def teardown(self) -> None:
        for seq in getattr(self, "live", ()):
            self.blocks.release(seq)
        if hasattr(self, "blocks"):
            self.blocks.check_integrity([])
            assert self.available() == [kind.num_blocks for kind in self.blocks.kinds]


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,  # a busy machine is no finding
    suppress_health_check=[HealthCheck.too_slow],
)

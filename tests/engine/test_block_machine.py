"""Any order of what is done to blocks: memory always holds its owners' own tokens."""

from __future__ import annotations

from engine.fakes import FakeKV, config, kv_manager, tags
from engine.test_blocks import sequence
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gpu_worker.engine.kv.kv_cache_groups import NO_BLOCK, KVCacheGroup, most_blocks_held
from penstock.gpu_worker.engine.plan import BlockCopy
from penstock.gpu_worker.engine.sequence import Sequence

MAX_SPAN = 5
pools = st.integers(1, 10)
groups = st.one_of(
    st.builds(KVCacheGroup, pools).map(lambda group: [group]),
    st.builds(KVCacheGroup, pools, st.integers(1, 5)).map(lambda group: [group]),
    st.tuples(
        st.builds(KVCacheGroup, pools, st.none() | st.just(6)),
        st.builds(KVCacheGroup, pools, st.integers(1, 5)),
        st.builds(KVCacheGroup, pools, st.just(2)),
    ).flatmap(lambda three: st.sampled_from([list(three), list(three[:2])])),
)


class BlockMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go; their memory must always hold their own tokens."""

    @initialize(groups=groups, size=st.integers(1, 4), prefix_cache=st.booleans())
    def build(self, groups: list[KVCacheGroup], size: int, prefix_cache: bool) -> None:
        cfg = config(
            block_size=size,
            num_blocks=groups[0].num_blocks,
            window=groups[0].window,
            more_kv_cache_groups=tuple(groups[1:]),
            prefix_cache=prefix_cache,
            chunk_size=MAX_SPAN,
        )
        self.blocks = kv_manager(cfg)
        self.kv = FakeKV(size, groups)
        self.live: list[Sequence] = []
        self.num_made = 0

    def new(self, token_ids: list[int], salt: bytes) -> Sequence:
        self.num_made += 1
        return sequence(token_ids, f"s{self.num_made}", salt)

    def needed(self, num_tokens: int) -> list[int]:
        """Most blocks of each pool that a sequence of this length may hold."""
        return [
            -(-num_tokens // pool.block_size)
            if pool.window is None
            else min(
                -(-num_tokens // pool.block_size),
                most_blocks_held(pool.window, MAX_SPAN, pool.block_size),
            )
            for pool in self.blocks.pools
        ]

    def held(self, seq: Sequence) -> list[int]:
        return [len(table) - table.count(NO_BLOCK) for table in seq.block_tables]

    def available(self) -> list[int]:
        return [pool.num_available for pool in self.blocks.pools]

    def write(self, seq: Sequence, stop: int, copies: list[BlockCopy]) -> None:
        self.kv.copy(copies)
        known = tags(seq.token_ids[:stop], seq.cache_salt)
        for position in range(seq.num_computed_tokens, stop):
            for group in range(len(self.blocks.pools)):
                block = seq.block_tables[group][position // self.blocks.block_size]
                owners = [other for other in self.live if block in other.block_tables[group]]
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
            assert max(self.held(seq)) <= self.blocks.pools[0].blocks_for(seq.num_tokens)
            self.live.append(seq)
        else:
            needed = self.needed(seq.num_tokens)
            share = [-(-spare * pool.num_blocks // self.blocks.pools[0].num_blocks)
                     for pool in self.blocks.pools]  # fmt: skip
            assert any(b < n + s for b, n, s in zip(before, needed, share, strict=True))
            assert (seq.block_tables, self.available()) == ((), before)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_new: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        seq.token_ids += data.draw(st.lists(st.integers(0, 1), min_size=num_new, max_size=num_new))
        if seq.num_computed_tokens == seq.num_tokens:
            return
        start = seq.num_computed_tokens
        stop = data.draw(st.integers(start + 1, min(seq.num_tokens, start + MAX_SPAN)))
        copies, before = list[BlockCopy](), ([list(t) for t in seq.block_tables], self.available())
        if self.blocks.try_reserve(seq, stop, copies):
            held = self.held(seq)
            assert all(h <= n for h, n in zip(held, self.needed(seq.num_tokens), strict=True))
            self.write(seq, stop, copies)
            if stop - start > 1 or stop % self.blocks.block_size == 0:  # as the engine does
                self.blocks.mark_computed(seq)
        else:
            alone = len(self.live) == 1
            assert not alone or seq.num_tokens > self.blocks.capacity_tokens
            assert (copies, ([list(t) for t in seq.block_tables], self.available())) == ([], before)

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
        self.blocks.drop_unneeded(self.live)
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
                self.blocks.mark_computed(seq)

    @precondition(lambda self: any(seq.num_computed_tokens for seq in self.live))
    @rule(data=st.data(), rest=st.lists(st.integers(0, 1), min_size=1, max_size=6),
          spare=st.integers(0, 2))  # fmt: skip
    def join(self, data: st.DataObject, rest: list[int], spare: int) -> None:
        sibling = data.draw(st.sampled_from([s for s in self.live if s.num_computed_tokens]))
        common = data.draw(st.integers(1, sibling.num_computed_tokens))
        seq = self.new([*sibling.token_ids[:common], *rest], sibling.cache_salt)
        copies, before = list[BlockCopy](), self.available()
        if not self.blocks.try_join(seq, sibling, common, spare, copies):
            assert (copies, seq.block_tables, self.available()) == ([], (), before)
            return
        assert self.available()[0] >= spare
        assert seq.num_computed_tokens == common
        assert max(self.held(seq)) <= self.blocks.pools[0].blocks_for(seq.num_tokens)
        num_full, rest_of_block = divmod(common, self.blocks.block_size)
        assert len(copies) == (len(self.blocks.pools) if rest_of_block else 0)
        for mine, theirs in zip(seq.block_tables, sibling.block_tables, strict=True):
            pairs = list(zip(mine[:num_full], theirs, strict=False))
            assert all(own in (NO_BLOCK, block) for own, block in pairs)
            assert not set(mine[num_full:]) & set(theirs)
        self.kv.copy(copies)
        self.live.append(seq)

    @precondition(lambda self: any(s.num_computed_tokens >= s.num_tokens - 1 for s in self.live))
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_SPAN - 1))
    def draft(self, data: st.DataObject, drafts: list[int]) -> None:
        """A step computes the last token and drafts behind it, of which the first are accepted."""
        seq = data.draw(
            st.sampled_from([s for s in self.live if s.num_computed_tokens >= s.num_tokens - 1])
        )
        if seq.num_computed_tokens == seq.num_tokens:
            seq.token_ids.append(data.draw(st.integers(0, 1)))
        num_tokens, copies = seq.num_tokens, list[BlockCopy]()
        before = [list(t) for t in seq.block_tables], self.available()
        if not self.blocks.try_reserve(seq, num_tokens + len(drafts), copies):
            assert (copies, ([list(t) for t in seq.block_tables], self.available())) == ([], before)
            return
        seq.token_ids += drafts
        self.write(seq, num_tokens + len(drafts), copies)
        accepted = data.draw(st.integers(0, len(drafts)))
        seq.token_ids[num_tokens + accepted :] = [data.draw(st.integers(0, 1))]
        seq.num_computed_tokens = num_tokens + accepted
        self.blocks.mark_computed(seq)
        self.blocks.trim(seq)
        most = -(-seq.num_tokens // self.blocks.block_size)
        assert all(len(table) <= most for table in seq.block_tables)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop_unneeded(self, data: st.DataObject) -> None:
        self.blocks.drop_unneeded(data.draw(st.lists(st.sampled_from(self.live), unique=True)))

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
            assert self.available() == [pool.num_blocks for pool in self.blocks.pools]


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,  # a busy machine is no finding
    suppress_health_check=[HealthCheck.too_slow],
)

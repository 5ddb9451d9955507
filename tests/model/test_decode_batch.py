"""Decode steps with tables in place are the steps that are packed from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from penstock.gpu_worker.engine.kv.kv_cache_groups import (
    NO_BLOCK,
    KVCacheGroup,
    first_seen_block,
)
from penstock.gpu_worker.model.forward.batch import PackedStep, Rows, SequenceChunk, pack
from penstock.gpu_worker.model.forward.decode_batch import DecodeBatch
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.geometry import KVGeometry

BLOCK_SIZE = 4
NUM_BLOCKS = 100_000
WINDOWS = (None, 6)


def make_pool() -> KVPool:
    """A pool of two groups that no layer belongs to: nothing is stored."""
    groups = [KVCacheGroup(NUM_BLOCKS, window) for window in WINDOWS]
    return KVPool(KVGeometry(()), groups, BLOCK_SIZE, torch.device("cpu"), torch.float32)


@dataclass(eq=False)
class Running:
    """A sequence as the engine keeps it: tables are lists that change in place."""

    position: int
    block_tables: tuple[list[int], ...]


def packed_anew(
    pool: KVPool, token_ids: list[int], running: list[Running], lens: list[int] | None = None
) -> PackedStep:
    lens = [1] * len(running) if lens is None else lens
    tokens = iter(token_ids)
    chunks = [
        SequenceChunk(
            list(islice(tokens, length)), sequence.position, sequence.block_tables, Rows.ALL
        )
        for length, sequence in zip(lens, running, strict=True)
    ]
    return pack(chunks, pool)


def assert_same(found: PackedStep, expected: PackedStep) -> None:
    """All that a step may read is the same; behind a context, tables may hold anything."""
    assert torch.equal(found.input_ids, expected.input_ids)
    assert torch.equal(found.rows, expected.rows)
    assert found.num_rows == expected.num_rows
    assert len(found.batches) == len(expected.batches)
    for ours, theirs in zip(found.batches, expected.batches, strict=True):
        for name in ("query_starts", "context_lens", "positions", "slots", "host_positions"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        for name in (
            "block_size", "host_query_lens", "host_context_lens", "host_query_starts",
            "max_query_len", "max_context_len", "window", "num_tokens", "num_sequences",
        ):  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, name), name
        assert theirs.max_block <= ours.max_block < NUM_BLOCKS
        assert torch.equal(ours.host_block_tables, ours.block_tables)
        for row, context in enumerate(theirs.host_context_lens):
            first_position = context - theirs.host_query_lens[row]
            first = first_seen_block(first_position, theirs.window, BLOCK_SIZE)
            seen = slice(first, -(-context // BLOCK_SIZE))
            assert torch.equal(
                ours.host_block_tables[row, seen], theirs.host_block_tables[row, seen]
            )


class DecodeSteps(RuleBasedStateMachine):
    """What the engine does to sequences between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.decodes = DecodeBatch(self.pool)
        self.running: list[Running] = []
        self.next_block = 0
        self.free: list[int] = []

    def fresh(self) -> int:
        """A block that was given back last, as the engine has it, or a new one."""
        if self.free:
            return self.free.pop()
        self.next_block += 1
        return self.next_block

    def table_to(self, position: int) -> list[int]:
        return [self.fresh() for _ in range(position // BLOCK_SIZE + 1)]

    @rule(position=st.integers(0, 90))
    def admit(self, position: int) -> None:
        self.running.append(Running(position, tuple(self.table_to(position) for _ in WINDOWS)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.running.remove(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out_and_in(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        sequence.block_tables = tuple(self.table_to(sequence.position) for _ in WINDOWS)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def take_another_kind_of_step(self, data: st.DataObject, tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.move(sequence, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def write_to_a_copy(self, data: st.DataObject) -> None:
        """The block that comes next was shared."""
        sequence = data.draw(st.sampled_from(self.running))
        for table in sequence.block_tables:
            table[sequence.position // BLOCK_SIZE] = self.fresh()

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        self.running = data.draw(st.permutations(self.running))

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 12), dropped=st.booleans())
    def decode(self, steps: int, dropped: bool) -> None:
        before: list[PackedStep] = []  # still running, with what it reads
        for step in range(steps):
            token_ids = [step * 1000 + row for row in range(len(self.running))]
            found = self.decodes.pack(
                token_ids,
                [sequence.position for sequence in self.running],
                [sequence.block_tables for sequence in self.running],
                ahead=bool(before),
            )
            expected = packed_anew(self.pool, token_ids, self.running)
            assert_same(found, expected)
            if before:
                assert_same(*before)
                if dropped:
                    return  # what was packed ahead is never run
                self.decodes.take_ahead()
            before = [found, expected]
            for sequence in self.running:
                self.move(sequence, 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def verify_drafts(self, data: st.DataObject, steps: int) -> None:
        """Of which some are refused: their blocks go back, and may be others in the next step."""
        for step in range(steps):
            lens = [data.draw(st.integers(1, 7)) for _ in self.running]
            for sequence, length in zip(self.running, lens, strict=True):
                self.reserve(sequence, sequence.position + length)
            token_ids = [step * 1000 + row for row in range(sum(lens))]
            found = self.decodes.pack(
                token_ids,
                [sequence.position for sequence in self.running],
                [sequence.block_tables for sequence in self.running],
                tuple(lens),
            )
            assert_same(found, packed_anew(self.pool, token_ids, self.running, lens))
            for sequence, length in zip(self.running, lens, strict=True):
                sequence.position += data.draw(st.integers(1, length))
                for table in sequence.block_tables:
                    keep = sequence.position // BLOCK_SIZE + 1
                    self.free += reversed(table[keep:])
                    del table[keep:]
                self.move(sequence, 0)

    def reserve(self, sequence: Running, stop: int) -> None:
        for table in sequence.block_tables:
            while len(table) * BLOCK_SIZE < stop:
                table.append(self.fresh())

    def move(self, sequence: Running, tokens: int) -> None:
        sequence.position += tokens
        for table, window in zip(sequence.block_tables, WINDOWS, strict=True):
            while len(table) * BLOCK_SIZE <= sequence.position:
                table.append(self.fresh())
            for index in range(first_seen_block(sequence.position, window, BLOCK_SIZE)):
                if table[index] != NO_BLOCK:
                    self.free.insert(0, table[index])
                table[index] = NO_BLOCK


TestDecodeSteps = DecodeSteps.TestCase


def test_a_table_outgrows_its_width() -> None:
    pool = make_pool()
    decodes = DecodeBatch(pool)
    running = [Running(0, ([7], [8])), Running(2, ([5], [6]))]
    for step in range(300):
        for sequence in running:
            for table in sequence.block_tables:
                if len(table) * BLOCK_SIZE <= sequence.position:
                    table.append(1000 + 10 * step + sequence.position)
        token_ids = [step, step + 1]
        found = decodes.pack(
            token_ids,
            [sequence.position for sequence in running],
            [sequence.block_tables for sequence in running],
        )
        assert_same(found, packed_anew(pool, token_ids, running))
        for sequence in running:
            sequence.position += 1


def test_a_table_that_is_too_short_is_an_error() -> None:
    """The engine's tables reach every position it plans."""
    decodes, tables = DecodeBatch(make_pool()), ([3], [4])
    with pytest.raises(ValueError, match="sequence 0 has 1 blocks of 4 tokens"):
        decodes.pack([1], [BLOCK_SIZE], [tables])
    running = [Running(BLOCK_SIZE - 1, tables)]
    found = decodes.pack([1], [BLOCK_SIZE - 1], [tables])
    assert_same(found, packed_anew(make_pool(), [1], running))


def test_a_block_that_comes_back_at_the_end_hides_no_other() -> None:
    """Drafts are refused, their blocks go back, and of two the last one alone is given again."""
    pool = make_pool()
    decodes = DecodeBatch(pool)
    tables = ([10, 11, 12, 13], [20, 21, 22, 23])
    running = [Running(3, tables)]
    decodes.pack([5] * 10, [3], [tables], (10,))
    for table, block in zip(tables, (30, 40), strict=True):
        table[2] = block
    running[0].position = 4
    found = decodes.pack([6] * 10, [4], [tables], (10,))
    assert_same(found, packed_anew(pool, [6] * 10, running, [10]))

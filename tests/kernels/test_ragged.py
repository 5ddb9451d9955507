"""The packed layout: slots, positions, and what is refused; the length buckets made of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import make_batch

from penstock.kernels import AttentionWorkspace, RaggedBatch
from penstock.kernels._length_buckets import BUCKET_BYTES, PADDING_BYTES


def test_every_row_knows_its_position_and_slot():
    batch = RaggedBatch.from_lists([1, 3], [6, 3], [[7, 2, 9], [4]], block_size=4)

    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.context_lens.tolist() == [6, 3]
    # The third block of the first sequence is not reached by its context.
    assert batch.block_tables.tolist() == [[7, 2], [4, 0]]
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert batch.slots.tolist() == [2 * 4 + 1, 16, 17, 18]
    assert (batch.num_sequences, batch.num_tokens, batch.max_block) == (2, 4, 7)
    assert (batch.max_query_len, batch.max_context_len) == (3, 6)


def test_dtypes():
    batch = RaggedBatch.from_lists([2], [2], [[0]], block_size=4)

    assert batch.slots.dtype == batch.positions.dtype == torch.int64
    assert batch.query_starts.dtype == batch.context_lens.dtype == torch.int32
    assert batch.block_tables.dtype == torch.int32


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "tables", "block_size", "message"),
    [
        ([], [], [], 4, "at least one sequence"),
        ([1], [1, 2], [[0]], 4, "1, 2 and 1 sequences"),
        ([1, 0], [1, 4], [[0], [1]], 4, "sequence 1 has query_len 0"),
        ([5], [4], [[0]], 4, "query_len 5 and context_len 4"),
        ([1], [5], [[0]], 4, "1 blocks of 4 tokens, too few for its context of 5"),
        ([1, 1], [1, 1], [[0], [-1]], 4, "table of sequence 1 has a negative block id"),
        ([1], [1], [[2**31]], 4, "table of sequence 0 is not of int32"),
        ([1], [1], [[0]], 0, "block_size is 0"),
    ],
)
def test_what_makes_no_batch_is_refused(query_lens, context_lens, tables, block_size, message):
    with pytest.raises(ValueError, match=message):
        RaggedBatch.from_lists(query_lens, context_lens, tables, block_size=block_size)


def test_blocks_before_the_window_may_be_gone():
    tables = [[-1, -1, 7, 2], [-1, 5, 3]]
    batch = RaggedBatch.from_lists([1, 3], [14, 11], tables, block_size=4, window=5)
    assert batch.block_tables.tolist() == [[-1, -1, 7, 2], [-1, 5, 3, 0]]
    assert batch.slots.tolist() == [2 * 4 + 1, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    # Position 13 sees 9 to 13 in blocks 2 and 3, positions 8 to 10 see 4 to 10 in 1 and 2.
    for window in (7, None):  # with 7 position 13 sees 7, too
        with pytest.raises(ValueError, match="table of sequence 0 has a negative block id"):
            RaggedBatch.from_lists([1, 3], [14, 11], tables, block_size=4, window=window)


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 5]])
def test_the_same_tokens_with_other_tables(query_lens):
    context_lens, first, second = [9, 6], [[0, 1, 2], [3, 4]], [[-1, 9, 8], [7, 6]]
    built = RaggedBatch.from_lists(query_lens, context_lens, first, block_size=4)
    found = built.with_tables(second, window=5)
    expected = RaggedBatch.from_lists(query_lens, context_lens, second, block_size=4, window=5)
    for name in ("block_tables", "slots", "positions", "query_starts", "context_lens"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert (found.max_block, found.window) == (9, 5)
    workspace = AttentionWorkspace()
    slots = [workspace.buckets(each, 5, 4)[0].slots.tolist() for each in (built, found)]
    assert slots[0] != slots[1]
    with pytest.raises(ValueError, match="too few for its context"):
        built.with_tables([[1], [2]], window=None)


sequences = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 900)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(
    sequences=sequences,
    block_size=st.integers(1, 33),
    window=st.none() | st.integers(1, 400),
    key_bytes=st.sampled_from([64, 768, 8192]),
)
def test_buckets_cover_each_row_once_and_bound_their_padding(
    sequences, block_size, window, key_bytes
):
    query_lens, context_lens = (list(lens) for lens in zip(*sequences, strict=True))
    batch, tables = make_batch(query_lens, context_lens, block_size)
    owner = [s for s, query_len in enumerate(query_lens) for _ in range(query_len)]

    seen: list[int] = []
    for bucket in AttentionWorkspace().buckets(batch, window, key_bytes):
        rows = torch.arange(batch.num_tokens)[bucket.rows]
        assert len(rows) == bucket.num_rows
        seen += rows.tolist()
        if bucket.padded_rows is None:
            padded = rows.view(bucket.num_sequences, bucket.query_len)
        else:
            padded = bucket.padded_rows.view(bucket.num_sequences, bucket.query_len)
            assert padded.flatten()[bucket.kept].tolist() == rows.tolist()
        slots = bucket.slots.view(bucket.num_sequences, bucket.kv_len)
        padding, lengths = 0, set()
        for member, its_rows in enumerate(padded.tolist()):
            sequence = owner[its_rows[0]]
            table, context = tables[sequence], context_lens[sequence]
            query_len, begin = query_lens[sequence], batch.host_query_starts[sequence]
            assert its_rows == [begin + min(i, query_len - 1) for i in range(bucket.query_len)]
            first = 0 if window is None else max(0, context - query_len - window + 1)
            expected = [
                table[position // block_size] * block_size + position % block_size
                for position in range(first, context)
            ]
            lengths.add(query_len)
            padding += bucket.kv_len - len(expected)
            padding += (bucket.query_len - query_len) * bucket.kv_len // 2
            expected += expected[-1:] * (bucket.kv_len - len(expected))
            assert slots[member].tolist() == expected
        # Each length of queries may have a bucket's worth of padding, and as much to join another.
        assert padding * key_bytes <= (2 * len(lengths) - 1) * PADDING_BYTES
        assert bucket.num_sequences == 1 or len(slots.flatten()) * key_bytes <= BUCKET_BYTES
    assert sorted(seen) == list(range(batch.num_tokens))


def test_drafts_of_different_lengths_are_one_bucket():
    lens = [(1, 9), (4, 12), (2, 6)]
    batch, _ = make_batch([query for query, _ in lens], [context for _, context in lens], 4)

    (bucket,) = AttentionWorkspace().buckets(batch, None, 64)
    assert (bucket.num_sequences, bucket.query_len, bucket.kv_len) == (3, 4, 12)
    assert bucket.rows == slice(0, 7)
    assert bucket.padded_rows.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert bucket.kept.tolist() == [0, 4, 5, 6, 7, 8, 9]


def test_layers_of_a_step_share_their_buckets():
    batch = RaggedBatch.from_lists([1, 1], [6, 3], [[0, 1], [2]], block_size=4)
    workspace = AttentionWorkspace()

    full = workspace.buckets(batch, None, 64)
    assert workspace.buckets(batch, None, 64) is full
    assert workspace.buckets(batch, 6, 64) is full, "a window of the whole context is inert"
    assert workspace.buckets(batch, 2, 64) is not full


def test_a_wave_of_equal_decodes_is_one_bucket_without_a_mask():
    batch = RaggedBatch.from_lists([1] * 8, [5] * 8, [[i] for i in range(8)], block_size=8)

    (bucket,) = AttentionWorkspace().buckets(batch, None, 64)
    assert (bucket.num_sequences, bucket.query_len, bucket.kv_len) == (8, 1, 5)
    assert bucket.rows == slice(0, 8)
    assert bucket.bias(torch.float32) is None

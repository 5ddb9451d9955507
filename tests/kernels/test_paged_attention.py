"""The torch path against a token-by-token reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import TOLERANCE, Case, make_case, reference_attention, slid
from torch import Tensor

from penstock.kernels import (
    AttentionWorkspace,
    RaggedBatch,
    _length_buckets,
    _paged_attention_torch,
    paged_attention,
)

# heads, key/value heads, key dim, value dim
GEOMETRIES = {
    "mha": (3, 3, 8, 8),
    "gqa": (6, 2, 16, 16),
    "mqa": (5, 1, 20, 20),
    "mla": (4, 4, 24, 16),
}

# query lengths, context lengths
BATCHES = {
    "one-token": ([1], [1]),
    "decodes": ([1, 1, 1, 1], [5, 17, 33, 9]),
    "whole-prompts": ([11, 7], [11, 7]),
    "chunk-of-a-prompt": ([13], [40]),
    "drafts": ([4, 4, 4], [19, 4, 30]),
    "some-drafts": ([1, 4, 2, 1], [19, 4, 30, 1]),
    "long-chunk": ([_length_buckets.LONGEST_BATCHED_QUERY + 5], [37]),
    "everything": ([1, 7, 1, 18, 1, 7, 20], [33, 7, 1, 41, 12, 30, 20]),
}


def run(case: Case, **options: Any) -> Tensor:
    scale = case.query.shape[-1] ** -0.5
    return paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, scale=scale, **options
    )


def check(case: Case, workspace: AttentionWorkspace | None = None, **options: Any) -> None:
    out = run(case, workspace=workspace, **options)
    assert out.dtype == case.query.dtype
    assert out.is_contiguous()
    expected = reference_attention(case, scale=case.query.shape[-1] ** -0.5, **options)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def some_case(lengths: str, geometry: str, dtype: torch.dtype = torch.float32) -> Case:
    heads, kv_heads, key_dim, value_dim = GEOMETRIES[geometry]
    return make_case(
        *BATCHES[lengths],
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=5,
        dtype=dtype,
    )


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_full_and_sliding(lengths, geometry, window):
    check(some_case(lengths, geometry), window=window)


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("geometry", ["gqa", "mla"])
@pytest.mark.parametrize(("window", "softcap", "sink"), [(None, 3.0, 0), (6, None, 1), (6, 3.0, 1)])
def test_softcap_and_sinks(lengths, geometry, window, softcap, sink):
    case = some_case(lengths, geometry)
    sinks = torch.linspace(-3, 5, case.query.shape[1]) if sink else None
    check(case, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 3.0}, {"sinks": torch.ones(6)}])
def test_half_precision(dtype, options):
    check(some_case("everything", "gqa", dtype), **options)


def test_a_huge_sink_leaves_nothing_and_a_tiny_one_changes_nothing():
    case = some_case("everything", "gqa")
    assert run(case, sinks=torch.full((6,), 1e4)).abs().max() == 0.0
    torch.testing.assert_close(run(case, sinks=torch.full((6,), -1e4)), run(case))


@settings(deadline=None)
@given(data=st.data())
def test_random_batches(data):
    sequences = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just(1), st.integers(0, 60)),
                st.tuples(st.integers(1, 25), st.integers(0, 40)),
            ),
            min_size=1,
            max_size=5,
        )
    )
    kv_heads = data.draw(st.integers(1, 2))
    key_dim = data.draw(st.integers(1, 12))
    heads = kv_heads * data.draw(st.integers(1, 2))
    case = make_case(
        [query for query, _ in sequences],
        [query + past for query, past in sequences],
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=data.draw(st.sampled_from([key_dim, key_dim + 3])),
        block_size=data.draw(st.integers(1, 20)),
        seed=data.draw(st.integers(0, 1000)),
    )
    check(
        case,
        window=data.draw(st.none() | st.integers(1, 50)),
        softcap=data.draw(st.none() | st.floats(0.5, 30)),
        sinks=data.draw(st.none() | st.just(torch.linspace(-2, 2, heads))),
    )


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_the_partition_into_buckets_does_not_show(monkeypatch, options):
    case = some_case("everything", "gqa")
    for padding, bucket in [(0, 0), (0, 1 << 30), (1 << 30, 1 << 30)]:
        monkeypatch.setattr(_length_buckets, "PADDING_BYTES", padding)
        monkeypatch.setattr(_length_buckets, "BUCKET_BYTES", bucket)
        check(case, **options)


def test_a_long_explicit_prefill_is_computed_in_pieces(monkeypatch):
    monkeypatch.setattr(_paged_attention_torch, "MOST_SCORES", 6 * 41 * 4)
    check(some_case("everything", "gqa"), window=30, softcap=3.0, sinks=torch.ones(6))


def test_slots_outside_the_context_have_no_influence():
    """Every case is poisoned with NaN there; this one also changes what the poison is."""
    case = some_case("everything", "gqa")
    before = run(case)
    for cache in (case.key_cache, case.value_cache):
        cache[cache.isnan()] = 1e30
    assert torch.equal(run(case), before)
    assert before.isfinite().all()


def test_a_window_reads_nothing_before_it():
    case = make_case([1, 3], [20, 20], heads=2, kv_heads=1, key_dim=8, value_dim=8, block_size=4)
    before = run(case, window=5)
    for sequence, query_len in enumerate([1, 3]):
        stale = case.batch.host_block_tables[sequence][: (20 - query_len - 5 + 1) // 4]
        assert len(stale) > 0
        case.key_cache[stale.long()] = float("nan")
        case.value_cache[stale.long()] = float("nan")
    assert torch.equal(run(case, window=5), before)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.ones(6)}])
@pytest.mark.parametrize("window", [1, 4, 5, 13, 100])
def test_blocks_before_the_window_need_not_exist(window, options):
    case = some_case("everything", "gqa")
    gone = slid(case, window)
    assert (gone.batch.host_block_tables < 0).any() == (window < 100)
    for narrower in {window, max(1, window - 2)}:
        assert torch.equal(
            run(gone, window=narrower, **options), run(case, window=narrower, **options)
        )


@pytest.mark.parametrize("window", [None, 6])
def test_a_layer_that_sees_further_than_the_tables_is_refused(window):
    with pytest.raises(ValueError, match=f"window is {window}, but .* filled for 5 tokens back"):
        run(slid(some_case("everything", "gqa"), 5), window=window)


def test_a_query_of_any_strides():
    case = some_case("everything", "gqa")
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    out = paged_attention(strided, case.key_cache, case.value_cache, case.batch, scale=0.25)
    assert torch.equal(
        out, paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=0.25)
    )


def test_one_workspace_serves_inside_and_outside_inference_mode():
    case, workspace = some_case("everything", "gqa"), AttentionWorkspace()
    with torch.inference_mode():
        inside = run(case, workspace=workspace), run(case, softcap=3.0, workspace=workspace)
    assert torch.equal(run(case, workspace=workspace), inside[0])
    assert torch.equal(run(case, softcap=3.0, workspace=workspace), inside[1])


def test_layers_of_different_geometry_and_dtype_share_a_workspace():
    """Heads and head sizes may differ per layer (Gemma 3n): scratch memory must not mix them up."""
    wide, narrow = some_case("everything", "gqa"), some_case("everything", "mla")
    half = some_case("everything", "mla", torch.bfloat16)
    workspace = AttentionWorkspace()
    for case in (narrow, wide, half, narrow):
        check(replace(case, batch=wide.batch), workspace=workspace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 6, 16)}, "query has 3 rows, the batch 4"),
        ({"query": torch.zeros(4, 6, 15)}, "does not fit the key cache"),
        ({"query": torch.zeros(4, 5, 16)}, "heads divide the query heads"),
        ({"query": torch.zeros(4, 6, 16).half()}, "must have one dtype"),
        ({"key_cache": torch.zeros(20, 4, 2, 16)}, "20 blocks of 4 tokens"),
        ({"key_cache": torch.zeros(2, 5, 2, 16)}, "2 blocks of 5 tokens"),
        ({"value_cache": torch.zeros(20, 5, 1, 16)}, "agree in all but the last dimension"),
        ({"key_cache": torch.zeros(20, 5, 16, 2).transpose(2, 3)}, "must be contiguous"),
        ({"window": 0}, "window is 0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"sinks": torch.zeros(2)}, r"sinks is \[2\], it must be \[6\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments: dict[str, Any] = {
        "query": torch.zeros(4, 6, 16),
        "key_cache": torch.zeros(20, 5, 2, 16),
        "value_cache": torch.zeros(20, 5, 2, 16),
        "batch": RaggedBatch.from_lists([1, 3], [7, 3], [[4, 2], [3]], block_size=5),
        "scale": 0.25,
    }
    paged_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))

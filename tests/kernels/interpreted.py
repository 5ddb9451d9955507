"""The Triton kernels in Triton's interpreter; run by test_triton.py, in a process of its own.

The interpreter must be asked for before Triton is imported and then holds for the whole process,
which the other tests' process, where torch or transformers may import Triton, cannot promise.
About 4 ms per block of keys and program: the cases are small.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels_reference import TOLERANCE, make_batch, make_case, reference_attention, slid
from torch import Tensor

from penstock.kernels.gpu.kv_write_triton import write_kv_triton
from penstock.kernels.gpu.paged_attention_triton import paged_attention_triton
from penstock.kernels.gpu.quantized_linear_triton import quantized_linear_triton
from penstock.kernels.kv_layout import decode_fp8, encode_fp8, fp8_parts
from penstock.kernels.kv_write import write_kv
from penstock.kernels.quantized_linear import PackedWeight, pack_codes

assert os.environ.get("TRITON_INTERPRET") == "1"

# heads, key/value heads, key dim, value dim: none a power of two where it may be none
GQA = (6, 2, 16, 16)
MQA = (5, 1, 20, 20)
MLA = (2, 2, 24, 16)
WIDE = (34, 2, 8, 8)  # 17 query heads per key/value head: more than the smallest tile

DECODES = ([1, 1, 1], [5, 70, 9])
PROMPT = ([11], [11])
DRAFTS = ([4, 4, 4], [19, 4, 30])
MIXED = ([1, 7, 1, 40, 3], [33, 7, 1, 70, 12])  # the fourth takes several tiles


def check(
    lengths: tuple[list[int], list[int]],
    geometry: tuple[int, int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 5,
    **given: Any,
) -> None:
    heads, kv_heads, key_dim, value_dim = geometry
    case = make_case(
        *lengths,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        dtype=dtype,
    )
    options: dict[str, Any] = {"window": None, "softcap": None, "sinks": None} | given
    out: Tensor = paged_attention_triton(
        case.query, case.key_cache, case.value_cache, case.batch, scale=0.3, **options
    )
    assert out.dtype == dtype
    expected = reference_attention(case, scale=0.3, **options)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("lengths", "geometry"),
    [
        *((lengths, GQA) for lengths in (DECODES, PROMPT, DRAFTS, MIXED)),
        *((lengths, geometry) for lengths in (DECODES, MIXED) for geometry in (MQA, MLA, WIDE)),
    ],
)
def test_batches_and_geometries(lengths, geometry):
    check(lengths, geometry)


ALL_OPTIONS: dict[str, Any] = {
    "window": 6,
    "softcap": 3.0,
    "sinks": torch.linspace(-3, 5, 6),
}


@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_one_option(name):
    check(MIXED, GQA, **{name: ALL_OPTIONS[name]})


@pytest.mark.parametrize(
    ("lengths", "dtype"), [(DECODES, torch.float32), *((MIXED, dtype) for dtype in TOLERANCE)]
)
def test_all_options(lengths, dtype):
    check(lengths, GQA, dtype=dtype, **ALL_OPTIONS)


def test_a_window_of_one_token():
    check(MIXED, MLA, window=1)


@pytest.mark.parametrize("window", [1, 6, 20])
def test_blocks_before_the_window_need_not_exist(window):
    heads, kv_heads, key_dim, value_dim = GQA
    case = make_case(
        *MIXED, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, block_size=5
    )
    options: dict[str, Any] = {"window": window, "softcap": None, "sinks": None}
    outputs = [
        paged_attention_triton(c.query, c.key_cache, c.value_cache, c.batch, scale=0.3, **options)
        for c in (case, slid(case, window))
    ]
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_block_sizes(block_size):
    check(MIXED, GQA, block_size=block_size, window=40)


def test_a_softcap_far_below_the_scores():
    check(DECODES, GQA, softcap=0.01)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [(3, 8, 8), (1, 24, 16), (2, 5, 7)])
def test_kv_write(dims, dtype):
    heads, key_dim, value_dim = dims
    batch, tables = make_batch([1, 9, 4], [8, 9, 15], 5)
    blocks = sum(map(len, tables)) + 3
    key = torch.randn(heads, 14, key_dim).to(dtype).transpose(0, 1)
    value = torch.randn(heads, 14, value_dim).to(dtype).transpose(0, 1)
    key_cache = torch.full((blocks, 5, heads, key_dim), -7.0, dtype=dtype)
    value_cache = torch.full((blocks, 5, heads, value_dim), -7.0, dtype=dtype)
    expected = key_cache.clone().flatten(0, 1), value_cache.clone().flatten(0, 1)
    for row, slot in enumerate(batch.slots.tolist()):
        expected[0][slot], expected[1][slot] = key[row], value[row]

    write_kv_triton(key, value, key_cache, value_cache, batch.slots, block_size=5)

    assert torch.equal(key_cache.flatten(0, 1), expected[0])
    assert torch.equal(value_cache.flatten(0, 1), expected[1])


def cache_in_fp8(cache: Tensor) -> Tensor:
    """The same keys or values in ``KVLayout.HEADS_FP8``; NaN where they are NaN."""
    blocks, block_size, heads, dim = cache.shape
    found = torch.full((blocks, heads, block_size * (dim + 1)), 255, dtype=torch.uint8)
    for part, states in zip(fp8_parts(found, block_size), encode_fp8(cache), strict=True):
        part.copy_(states.transpose(1, 2))
    return found


@pytest.mark.parametrize(
    ("lengths", "geometry", "dtype", "given"),
    [
        (MIXED, GQA, torch.float32, {}),
        (DECODES, MLA, torch.float32, {"window": 6}),
        (MIXED, WIDE, torch.float16, {}),
        (DECODES, MQA, torch.bfloat16, {}),
        (MIXED, GQA, torch.bfloat16, ALL_OPTIONS),
    ],
)
def test_attention_over_fp8_is_that_of_the_rounded_numbers(lengths, geometry, dtype, given):
    heads, kv_heads, key_dim, value_dim = geometry
    dims = {"heads": heads, "kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim}
    case = make_case(*lengths, **dims, block_size=5, dtype=dtype)
    options: dict[str, Any] = {"window": None, "softcap": None, "sinks": None} | given
    caches = [cache_in_fp8(cache) for cache in (case.key_cache, case.value_cache)]
    out = paged_attention_triton(case.query, *caches, case.batch, scale=0.3, **options)
    assert out.dtype == dtype
    rounded = [
        [decode_fp8(*encode_fp8(states), torch.float32) for states in part]
        for part in (case.keys, case.values)
    ]
    expected = reference_attention(
        replace(case, keys=rounded[0], values=rounded[1]), scale=0.3, **options
    )
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [(3, 8, 8), (1, 24, 16), (2, 5, 7), (5, 1030, 16)])
def test_kv_write_in_fp8_is_torchs_to_the_last_bit(dims, dtype):
    heads, key_dim, value_dim = dims
    batch, tables = make_batch([1, 9, 4], [8, 9, 15], 5)
    blocks = sum(map(len, tables)) + 3
    generator = torch.Generator().manual_seed(0)
    states = []
    for dim in (key_dim, value_dim):
        wide = torch.randn(heads, 14, dim, generator=generator)
        # Each row over the whole range of e4m3 and beyond, rows of many sizes.
        wide *= torch.logspace(-7, 0, dim) * torch.logspace(-4, 4, 14)[:, None]
        wide[0, 0], wide[0, 1, 2], wide[0, 2, 0] = 0, torch.nan, -torch.inf
        wide[0, 3], wide[0, 4, 0], wide[0, 5] = 448, 449, torch.linspace(-2, 2, dim) * 2**-6
        states.append(wide.to(dtype).transpose(0, 1))
    caches = [
        torch.full((blocks, heads, 5 * (dim + 1)), 99, dtype=torch.uint8)
        for dim in (key_dim, value_dim)
    ]
    expected = [cache.clone() for cache in caches]
    write_kv(*states, *expected, batch.slots, block_size=5)
    write_kv_triton(*states, *caches, batch.slots, block_size=5)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])
    codes, exponents = fp8_parts(caches[0], 5)
    assert len(codes.unique()) > 40
    assert (exponents == 255).sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "bits"),
    [(1, 7, 3, 7, 4), (5, 96, 70, 32, 4), (19, 130, 65, 64, 8), (3, 200, 9, 200, 8)],
)
def test_quantized_linear(rows, inputs, outputs, group, bits, offsets, dtype):
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = -(-inputs // group)
    scales = torch.randn(outputs, groups, generator=generator) / 2**bits
    values = torch.linspace(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 2**bits)
    shift = torch.randn(outputs, groups, generator=generator) / 4 if offsets else None
    packed = PackedWeight(bits, pack_codes(codes, bits), scales, group, values, shift, inputs)
    group_of = torch.arange(inputs) // group
    weight = values.double()[codes.int()] * scales.double()[:, group_of]
    if shift is not None:
        weight += shift.double()[:, group_of]
    assert torch.allclose(packed.dequantized(torch.float32).double(), weight, atol=1e-6)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    expected = x.double() @ weight.T
    out = quantized_linear_triton(x, packed.codes, scales, values, shift, bits=bits, group=group)
    error = (out.double() - expected).abs().max()
    assert float(error / expected.abs().max()) < (1e-5 if dtype == torch.float32 else 4e-3)

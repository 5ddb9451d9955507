"""The Triton kernel of ``paged_attention``: ragged queries, one pass over the paged cache.

One program computes a tile of one sequence's queries for one key/value head. All query heads of
that head are rows of the tile, so each key is read once per tile however many heads share it (GQA).
The softmax is accumulated online (FlashAttention: Dao et al. 2022), in base 2.
"""

# A kernel's parameters are Triton's values, not Python's: no annotation would say anything true.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_layout import CacheShape
from ..ragged import RaggedBatch


# Not specialised: these change from step to step, and each special value would compile anew.
@triton.jit(do_not_specialize=["num_sequences", "window"])
def paged_attention_kernel(
    out,
    query,
    key_cache,
    value_cache,
    query_starts,
    context_lens,
    block_tables,
    sinks,
    num_sequences,
    scale,
    softcap,
    window,
    query_stride_t,
    query_stride_h,
    query_stride_d,
    out_stride_t,
    out_stride_h,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,  # a factor of every cache address
    QUERIES_PER_KV: tl.constexpr,  # row / heads and row % heads become multiplications
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,  # tile shapes are powers of two
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # position / block_size becomes a shift
    BLOCK_M: tl.constexpr,  # rows of a tile, at least 16 for tl.dot
    BLOCK_N: tl.constexpr,  # keys per iteration
    DECODE: tl.constexpr,  # one query token per sequence: no search, no tile beyond the last
    HAS_WINDOW: tl.constexpr,  # the rest drop what a layer does not use
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,  # the caches are in KVLayout.HEADS_FP8
    UPCAST: tl.constexpr,  # the interpreter multiplies bf16 wrongly, without an error
):
    """Compute one tile of queries for one key/value head."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    BLOCK_Q: tl.constexpr = BLOCK_M // QUERIES_PER_KV
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if DECODE:
        sequence = tile
        tile_start = 0
    else:
        # Sequence s owns the tiles from number query_starts[s] // BLOCK_Q + s on. That is room for
        # all of its own, and needs no table of tiles. Find the last s that starts here or before.
        low = 0
        high = num_sequences
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(query_starts + middle) // BLOCK_Q + middle <= tile:
                low = middle
            else:
                high = middle
        sequence = low
        first_tile = tl.load(query_starts + sequence) // BLOCK_Q + sequence
        tile_start = (tile - first_tile) * BLOCK_Q
    first_row = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_row
    if tile_start >= query_len:
        return
    context_len = tl.load(context_lens + sequence)

    row = tl.arange(0, BLOCK_M)
    token = tile_start + row // QUERIES_PER_KV
    head = kv_head * QUERIES_PER_KV + row % QUERIES_PER_KV
    row_inside = (row < BLOCK_Q * QUERIES_PER_KV) & (token < query_len)
    position = context_len - query_len + token
    packed = (first_row + token).to(tl.int64)

    key_dim = tl.arange(0, PADDED_KEY_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    q = tl.load(
        query
        + packed[:, None] * query_stride_t
        + head[:, None] * query_stride_h
        + key_dim[None, :] * query_stride_d,
        mask=row_inside[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)

    if HAS_SINKS:
        # A sink is a key already seen, with a value of zero.
        maximum = tl.load(sinks + head, mask=row_inside, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    accumulated = tl.zeros([BLOCK_M, PADDED_VALUE_DIM], tl.float32)

    # The keys any row of this tile may see.
    first_position = context_len - query_len + tile_start
    stop = tl.minimum(first_position + BLOCK_Q, context_len)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(first_position - window + 1, 0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for base in range(start, stop, BLOCK_N):
        key_position = base + tl.arange(0, BLOCK_N)
        inside = key_position < stop
        block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = key_position % BLOCK_SIZE
        if FP8:
            head_row = block * NUM_KV_HEADS + kv_head
            key_row = head_row * (BLOCK_SIZE * (KEY_DIM + 1)) + offset * KEY_DIM
            value_row = head_row * (BLOCK_SIZE * (VALUE_DIM + 1)) + offset * VALUE_DIM
        else:
            cache_row = (block * BLOCK_SIZE + offset) * NUM_KV_HEADS + kv_head
            key_row = cache_row * KEY_DIM
            value_row = cache_row * VALUE_DIM

        # Slots past `stop` are not read: whatever they hold, NaN included, has no influence.
        k = tl.load(
            key_cache + key_row[None, :] + key_dim[:, None],
            mask=inside[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0,
        )
        if FP8:
            scales = head_row * (BLOCK_SIZE * (KEY_DIM + 1)) + BLOCK_SIZE * KEY_DIM + offset
            exponent = tl.load(key_cache + scales, mask=inside, other=0)
            k = _decode_fp8(k, exponent[None, :]).to(q.dtype)
        elif UPCAST:
            k = k.to(tl.float32)
        # ieee: fp32 must not silently become tf32.
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh by an exponential that cannot overflow, whatever the sign.
            decay = tl.exp(-2.0 * tl.abs(scores) / softcap)
            bounded = softcap * (1.0 - decay) / (1.0 + decay)
            scores = tl.where(scores < 0.0, -bounded, bounded)
        visible = key_position[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= key_position[None, :] > position[:, None] - window
        scores = tl.where(visible & inside[None, :], scores * LOG2_E, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(maximum - shift)
        v = tl.load(
            value_cache + value_row[:, None] + value_dim[None, :],
            mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0,
        )
        if FP8:
            scales = head_row * (BLOCK_SIZE * (VALUE_DIM + 1)) + BLOCK_SIZE * VALUE_DIM + offset
            exponent = tl.load(value_cache + scales, mask=inside, other=0)
            v = _decode_fp8(v, exponent[:, None]).to(q.dtype)
        elif UPCAST:
            v = v.to(tl.float32)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        accumulated = accumulated * fade[:, None] + weighted
        total = total * fade + tl.sum(weights, 1)
        maximum = new_maximum

    # Rows outside the tile saw keys too or none; they are not stored, only kept from dividing by 0.
    result = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + packed[:, None] * out_stride_t + head[:, None] * out_stride_h + value_dim[None, :],
        result.to(out.dtype.element_ty),
        mask=row_inside[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit
def _decode_fp8(codes, exponents):
    """``kv_layout.decode_fp8`` in float32, for shapes that broadcast."""
    bits = codes.to(tl.int32)
    # In float16 e4m3's exponent is 8 too small; its subnormals are float16's.
    half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.int16)
    number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return number * (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


def constants(
    *,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    element_size: int,
    decode: bool,
    window: bool,
    softcap: bool,
    sinks: bool,
    fp8: bool = False,
    upcast: bool = False,
) -> dict[str, int | bool]:
    """The kernel's compile-time arguments for a geometry; ``decode``: one query token each."""
    queries_per_kv = num_heads // num_kv_heads
    padded_key_dim = max(16, triton.next_power_of_2(key_dim))
    padded_value_dim = max(16, triton.next_power_of_2(value_dim))
    # Queries, and the pipeline's keys and values of two iterations, must fit a block's shared
    # memory: 99 KiB on consumer cards, also in fp32 with heads of 256.
    row_bytes = max(padded_key_dim, padded_value_dim) * element_size
    rows = 16 if decode else 64 if row_bytes <= 512 else 32
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "QUERIES_PER_KV": queries_per_kv,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PADDED_KEY_DIM": padded_key_dim,
        "PADDED_VALUE_DIM": padded_value_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(rows, triton.next_power_of_2(queries_per_kv)),
        "BLOCK_N": 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16,
        "DECODE": decode,
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "HAS_SINKS": sinks,
        "FP8": fp8,
        "UPCAST": upcast,
    }


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See ``paged_attention.paged_attention``, which has checked the arguments."""
    num_tokens, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = CacheShape.of(value_cache, batch.block_size)
    decode = batch.max_query_len == 1
    fixed = constants(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        element_size=query.element_size(),
        decode=decode,
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks is not None,
        fp8=value_cache.dtype == torch.uint8,
        upcast=not query.is_cuda and query.dtype is torch.bfloat16,
    )
    block_q = int(fixed["BLOCK_M"]) // int(fixed["QUERIES_PER_KV"])
    tiles = num_tokens if decode else num_tokens // block_q + batch.num_sequences
    out = query.new_empty(num_tokens, num_heads, value_dim)
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        paged_attention_kernel[(tiles, num_kv_heads)](
            out,
            query,
            key_cache,
            value_cache,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            query if sinks is None else sinks,  # an unused pointer, but a pointer
            batch.num_sequences,
            scale,
            1.0 if softcap is None else softcap,
            0 if window is None else window,
            *query.stride(),
            out.stride(0),
            out.stride(1),
            batch.block_tables.stride(0),
            **fixed,
        )
    return out

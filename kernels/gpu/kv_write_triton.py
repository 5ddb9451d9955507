"""The Triton kernels of ``kv_write``: one program writes one token's keys and values.

Where it rounds them, many heads are several programs'.
"""

# A kernel's parameters are Triton's values, not Python's: no annotation would say anything true.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_NUMBERS = 4096
"""Of a program that rounds: more would leave the registers of four warps."""


@triton.jit
def kv_write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride_t,
    key_stride_h,
    key_stride_d,
    value_stride_t,
    value_stride_h,
    value_stride_d,
    NUM_KV_HEADS: tl.constexpr,  # with the dims below: turns / and % into multiplications
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # tl.arange needs a power of two known at compile time
    VALUE_BLOCK: tl.constexpr,
):
    """Write one token: ``program_id(0)`` is its row."""
    token = tl.program_id(0).to(tl.int64)
    # int64: slot * row size passes 2**31 in a cache of a few gigabytes.
    slot = tl.load(slots + token)

    element = tl.arange(0, KEY_BLOCK)
    inside = element < NUM_KV_HEADS * KEY_DIM
    head, dim = element // KEY_DIM, element % KEY_DIM
    source = key + token * key_stride_t + head * key_stride_h + dim * key_stride_d
    target = key_cache + slot * (NUM_KV_HEADS * KEY_DIM) + element
    tl.store(target, tl.load(source, mask=inside), mask=inside)

    element = tl.arange(0, VALUE_BLOCK)
    inside = element < NUM_KV_HEADS * VALUE_DIM
    head, dim = element // VALUE_DIM, element % VALUE_DIM
    source = value + token * value_stride_t + head * value_stride_h + dim * value_stride_d
    target = value_cache + slot * (NUM_KV_HEADS * VALUE_DIM) + element
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def kv_write_fp8_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride_t,
    key_stride_h,
    key_stride_d,
    value_stride_t,
    value_stride_h,
    value_stride_d,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,  # tl.arange needs a power of two known at compile time
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    """Round and write some heads of one token: ``program_id(0)`` is its row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    row = (slot // BLOCK_SIZE) * NUM_KV_HEADS + head
    offset = slot % BLOCK_SIZE

    dim = tl.arange(0, PADDED_KEY_DIM)
    inside = (head < NUM_KV_HEADS)[:, None] & (dim < KEY_DIM)[None, :]
    source = key + token * key_stride_t + head[:, None] * key_stride_h + dim[None, :] * key_stride_d
    codes, exponent = _encode_fp8(tl.load(source, mask=inside, other=0.0))
    target = key_cache + row * (BLOCK_SIZE * (KEY_DIM + 1))
    tl.store(target[:, None] + offset * KEY_DIM + dim[None, :], codes, mask=inside)
    tl.store(target + BLOCK_SIZE * KEY_DIM + offset, exponent, mask=head < NUM_KV_HEADS)

    dim = tl.arange(0, PADDED_VALUE_DIM)
    inside = (head < NUM_KV_HEADS)[:, None] & (dim < VALUE_DIM)[None, :]
    source = value + token * value_stride_t
    source += head[:, None] * value_stride_h + dim[None, :] * value_stride_d
    codes, exponent = _encode_fp8(tl.load(source, mask=inside, other=0.0))
    target = value_cache + row * (BLOCK_SIZE * (VALUE_DIM + 1))
    tl.store(target[:, None] + offset * VALUE_DIM + dim[None, :], codes, mask=inside)
    tl.store(target + BLOCK_SIZE * VALUE_DIM + offset, exponent, mask=head < NUM_KV_HEADS)


@triton.jit
def _encode_fp8(states):
    """``kv_layout.encode_fp8`` of a tile ``[H, D]``, bit for bit."""
    wide = states.to(tl.float32)
    bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Of the bits, because a maximum of numbers would lose a NaN.
    largest = tl.max(bits, 1)
    finite = largest < 0x7F800000
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    inverse = tl.where(finite, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)
    scaled = tl.where(finite[:, None], tl.abs(wide), 0.0) * inverse[:, None]
    scaled_bits = scaled.to(tl.int32, bitcast=True)
    # Half a unit, less one bit where the kept part is even; then bias 7 instead of 127.
    rounded = scaled_bits + 0x7FFFF + ((scaled_bits >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2**-6 a unit is 2**-9, as it is of float32 numbers from 2**14: the sum rounds to it.
    small = (scaled + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(scaled < 0.015625, small, normal)
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(finite[:, None], code | sign, 0)
    return code.to(tl.uint8), tl.where(finite, exponent, 255).to(tl.uint8)


def constants(num_kv_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """The kernel's compile-time arguments for a geometry."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": triton.next_power_of_2(num_kv_heads * key_dim),
        "VALUE_BLOCK": triton.next_power_of_2(num_kv_heads * value_dim),
    }


def fp8_constants(
    num_kv_heads: int, key_dim: int, value_dim: int, block_size: int
) -> dict[str, int]:
    """The compile-time arguments of the kernel for ``KVLayout.HEADS_FP8``."""
    padded_key_dim = triton.next_power_of_2(key_dim)
    padded_value_dim = triton.next_power_of_2(value_dim)
    most_heads = max(1, _TILE_NUMBERS // max(padded_key_dim, padded_value_dim))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "TILE_HEADS": min(triton.next_power_of_2(num_kv_heads), most_heads),
        "PADDED_KEY_DIM": padded_key_dim,
        "PADDED_VALUE_DIM": padded_value_dim,
    }


def write_kv_triton(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    block_size: int,
) -> None:
    """See ``kv_write.write_kv``, which has checked the arguments."""
    num_tokens, num_kv_heads, key_dim = key.shape
    if num_tokens == 0:
        return
    dims = num_kv_heads, key_dim, value.shape[2]
    kernel, fixed, grid = kv_write_kernel, constants(*dims), (num_tokens, 1)
    if key_cache.dtype == torch.uint8:
        kernel, fixed = kv_write_fp8_kernel, fp8_constants(*dims, block_size)
        grid = num_tokens, triton.cdiv(num_kv_heads, fixed["TILE_HEADS"])
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
        kernel[grid](
            key,
            value,
            key_cache,
            value_cache,
            slots,
            *key.stride(),
            *value.stride(),
            **fixed,
        )

"""The Triton kernel of ``kv_write``: one program copies one token's keys and values."""

# A kernel's parameters are Triton's values, not Python's: no annotation would say anything true.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


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


def constants(num_kv_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """The kernel's compile-time arguments for a geometry."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": triton.next_power_of_2(num_kv_heads * key_dim),
        "VALUE_BLOCK": triton.next_power_of_2(num_kv_heads * value_dim),
    }


def write_kv_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See ``kv_write.write_kv``, which has checked the arguments."""
    num_tokens, num_kv_heads, key_dim = key.shape
    if num_tokens == 0:
        return
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
        kv_write_kernel[(num_tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slots,
            *key.stride(),
            *value.stride(),
            **constants(num_kv_heads, key_dim, value.shape[2]),
        )

"""Writes a step's keys and values into the paged cache.

Formula, for every packed row ``t``::

    block, offset = divmod(slots[t], block_size)
    key_cache[block, offset] = key[t]
    value_cache[block, offset] = value[t]

rounded as :mod:`.kv_layout` says where the cache is in 8 bits.

Reference: PagedAttention (Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gpu.availability import HAS_TRITON
from .kv_layout import CacheShape, encode_fp8, encode_kv, fp8_parts


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    block_size: int,
) -> None:
    """Scatter ``key`` and ``value`` to their slots in place; no other slot changes.

    Args:
        key: [T, Hkv, Dk], any strides.
        value: [T, Hkv, Dv], any strides; ``Dv`` may differ from ``Dk`` (MLA).
        key_cache: contiguous. [num_blocks, block_size, Hkv, Dk] in the dtype of ``key``, or in 8
            bits as ``KVLayout.TOKENS_INT8`` or ``HEADS_FP8`` lay them out.
        value_cache: as ``key_cache``, with ``Dv`` in place of ``Dk``.
        slots: int64 [T], ``block * block_size + offset``, all different, each below
            ``num_blocks * block_size`` (``RaggedBatch.slots``).
        block_size: tokens in a block.

    Raises:
        ValueError: shapes, dtypes or layouts disagree.
    """
    _check("key", key, key_cache, slots, block_size)
    _check("value", value, value_cache, slots, block_size)
    if key.is_cuda and HAS_TRITON and key_cache.dtype != torch.int8:
        from .gpu.kv_write_triton import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slots, block_size=block_size)
        return
    _write(key, key_cache, slots, block_size)
    _write(value, value_cache, slots, block_size)


def _write(states: Tensor, cache: Tensor, slots: Tensor, block_size: int) -> None:
    if cache.dtype == torch.uint8:
        codes, exponents = encode_fp8(states)
        stored_codes, stored_exponents = fp8_parts(cache, block_size)
        block, offset = slots // block_size, slots % block_size
        stored_codes[block, :, offset] = codes
        stored_exponents[block, :, offset] = exponents
        return
    rows = encode_kv(states) if cache.dtype == torch.int8 else states
    cache.flatten(0, 1).index_copy_(0, slots, rows)


def _check(name: str, states: Tensor, cache: Tensor, slots: Tensor, block_size: int) -> None:
    shape = CacheShape.of(cache, block_size)
    if shape.block_size != block_size:
        raise ValueError(
            f"the {name} cache has blocks of {shape.block_size} tokens, the slots are of blocks of "
            f"{block_size}"
        )
    if states.shape[0] != slots.shape[0] or states.shape[1:] != (shape.heads, shape.dim):
        raise ValueError(
            f"{name} is {list(states.shape)}, but slots {list(slots.shape)} and the {name} cache "
            f"{list(cache.shape)} ask for {[slots.shape[0], shape.heads, shape.dim]}"
        )
    if cache.dtype not in (states.dtype, torch.int8, torch.uint8):
        raise ValueError(f"{name} is {states.dtype}, but its cache holds {cache.dtype}")
    if not cache.is_contiguous():
        raise ValueError(f"the {name} cache must be contiguous")

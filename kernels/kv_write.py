"""Writes a step's keys and values into the paged cache.

Formula, for every packed row ``t``::

    block, offset = divmod(slots[t], block_size)
    key_cache[block, offset] = key[t]
    value_cache[block, offset] = value[t]

Reference: PagedAttention (Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from torch import Tensor

from ._triton import HAS_TRITON


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Scatter ``key`` and ``value`` to their slots in place; no other slot changes.

    Args:
        key: [T, Hkv, Dk], any strides.
        value: [T, Hkv, Dv], any strides; ``Dv`` may differ from ``Dk`` (MLA).
        key_cache: [num_blocks, block_size, Hkv, Dk], contiguous, dtype of ``key``.
        value_cache: [num_blocks, block_size, Hkv, Dv], contiguous, dtype of ``value``.
        slots: int64 [T], ``block * block_size + offset``, all different, each below
            ``num_blocks * block_size`` (``RaggedBatch.slots``).

    Raises:
        ValueError: shapes, dtypes or layouts disagree.
    """
    _check("key", key, key_cache, slots)
    _check("value", value, value_cache, slots)
    if key.is_cuda and HAS_TRITON:
        from ._kv_write_triton import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slots)
        return
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def _check(name: str, states: Tensor, cache: Tensor, slots: Tensor) -> None:
    if states.shape[0] != slots.shape[0] or states.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"{name} is {list(states.shape)}, but slots {list(slots.shape)} and the {name} cache "
            f"{list(cache.shape)} ask for {[slots.shape[0], *cache.shape[2:]]}"
        )
    if states.dtype != cache.dtype:
        raise ValueError(f"{name} is {states.dtype}, but its cache holds {cache.dtype}")
    if not cache.is_contiguous():
        raise ValueError(f"the {name} cache must be contiguous")

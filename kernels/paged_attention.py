"""Attention of packed ragged queries over a paged key/value cache.

Formula, for row ``t`` at position ``p`` of a sequence, query head ``h`` and its key/value head
``h // (Hq // Hkv)``, over the sequence's cached positions ``j``::

    s[j] = scale * (query[t, h] . key[j])
    s[j] = softcap * tanh(s[j] / softcap)              if softcap is given
    s[j] = -inf                                        unless p - window < j <= p
    out[t, h] = sum_j exp(s[j]) value[j] / (sum_j exp(s[j]) + exp(sinks[h]))

(the term of ``sinks`` only if given; the lower bound only if ``window`` is).

References: PagedAttention (Kwon et al. 2023, https://arxiv.org/abs/2309.06180); the GPU kernel's
online softmax follows FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._paged_attention_torch import paged_attention_torch
from .gpu.availability import HAS_TRITON
from .kv_layout import CacheShape
from .ragged import RaggedBatch
from .workspace import AttentionWorkspace


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: AttentionWorkspace | None = None,
) -> Tensor:
    """Compute attention for every packed row; the cache must hold the step's own keys already.

    CUDA tensors take the Triton kernel where Triton is installed, all others the torch path.
    Cache slots outside a sequence's context may hold anything, NaN included: they are never read.

    Args:
        query: [T, Hq, Dk], float32, float16 or bfloat16; any strides on the CPU, the last dimension
            contiguous on a GPU.
        key_cache: [num_blocks, block_size, Hkv, Dk], contiguous, dtype of ``query``; ``Hkv``
            divides ``Hq`` (1 is MQA, less than ``Hq`` GQA). Or in 8 bits as
            ``KVLayout.HEADS_FP8`` lays them out, or ``TOKENS_INT8``, which the torch path alone
            reads.
        value_cache: [num_blocks, block_size, Hkv, Dv], in the layout of ``key_cache``; ``Dv``
            may differ from ``Dk``.
        batch: the packed layout; its ``block_size`` is the caches'.
        scale: factor on the scores, usually ``Dk ** -0.5``.
        window: tokens a query sees including itself; None for all.
        softcap: bound of the scores (Gemma 2); None for none.
        sinks: [Hq], a logit per head that joins the softmax's denominator (gpt-oss); None for none.
        workspace: shared by the layers of a step, so the torch path lays the step out once. None
            lays it out for this call alone.

    Returns:
        [T, Hq, Dv], contiguous, dtype of ``query``.

    Raises:
        ValueError: shapes, dtypes or layouts disagree, or an option is out of range.
    """
    _check(query, key_cache, value_cache, batch, window, softcap, sinks)
    if query.is_cuda and HAS_TRITON and key_cache.dtype != torch.int8:
        from .gpu.paged_attention_triton import paged_attention_triton

        return paged_attention_triton(
            query,
            key_cache,
            value_cache,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    return paged_attention_torch(
        query,
        key_cache,
        value_cache,
        batch,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        workspace=AttentionWorkspace() if workspace is None else workspace,
    )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    num_tokens, num_heads, key_dim = query.shape
    keys = CacheShape.of(key_cache, batch.block_size)
    values = CacheShape.of(value_cache, batch.block_size)
    if num_tokens != batch.num_tokens:
        raise ValueError(f"query has {num_tokens} rows, the batch {batch.num_tokens}")
    if keys.block_size != batch.block_size or keys.blocks <= batch.max_block:
        raise ValueError(
            f"the key cache has {keys.blocks} blocks of {keys.block_size} tokens, the batch uses "
            f"block {batch.max_block} of {batch.block_size} tokens"
        )
    if batch.window is not None and (window is None or window > batch.window):
        raise ValueError(
            f"window is {window}, but the batch's tables are filled for {batch.window} tokens back"
        )
    if key_dim != keys.dim or num_heads % keys.heads:
        raise ValueError(
            f"query {list(query.shape)} does not fit the key cache {list(key_cache.shape)}: the "
            "last dimensions must be equal and the key/value heads divide the query heads"
        )
    if values[:3] != keys[:3]:
        raise ValueError(
            f"value cache {list(value_cache.shape)} and key cache {list(key_cache.shape)} must "
            "agree in all but the last dimension"
        )
    in_8_bits = key_cache.dtype in (torch.int8, torch.uint8)
    if key_cache.dtype != value_cache.dtype or not (in_8_bits or query.dtype == key_cache.dtype):
        raise ValueError(
            f"query, key cache and value cache must have one dtype, not {query.dtype}, "
            f"{key_cache.dtype} and {value_cache.dtype}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("the key and value caches must be contiguous")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, it must be at least 1 or None")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}, it must be positive or None")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks is {list(sinks.shape)}, it must be [{num_heads}], one per head")

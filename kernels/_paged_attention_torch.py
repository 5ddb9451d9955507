"""Paged attention in plain torch: the CPU path, and that of any device without Triton.

For each length bucket of the batch, gather keys and values through the block tables. Then compute
torch's fused attention or, for options that it lacks, scores, softmax and product in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ._length_buckets import LengthBucket
from .kv_layout import CacheShape, decode_fp8, decode_kv, fp8_parts
from .ragged import RaggedBatch
from .workspace import AttentionWorkspace

# The explicit path holds a score per query, head and key. It cuts a long prefill into pieces of at
# most this many scores (64 MiB in fp32).
MOST_SCORES = 1 << 24


def paged_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    workspace: AttentionWorkspace,
) -> Tensor:
    """See ``paged_attention.paged_attention``, which has checked the arguments."""
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads = CacheShape.of(key_cache, batch.block_size).heads
    value_dim = CacheShape.of(value_cache, batch.block_size).dim
    fused = softcap is None and sinks is None and key_dim == value_dim
    key_bytes = key_cache[0].nbytes // batch.block_size

    out: Tensor | None = None
    for bucket in workspace.buckets(batch, window, key_bytes):
        rows = bucket.rows
        whole = bucket.num_rows == num_tokens
        if bucket.padded_rows is not None:
            bucketed = query.index_select(0, bucket.padded_rows)
        elif whole:
            bucketed = query
        elif isinstance(rows, slice):
            bucketed = query[rows]
        else:
            bucketed = query.index_select(0, rows)
        # [B, Q, Hkv, G, D]: query heads of one key/value head stand together. So GQA is a matter of
        # shape, and no key is ever repeated.
        bucketed = bucketed.reshape(
            bucket.num_sequences, bucket.query_len, num_kv_heads, num_heads // num_kv_heads, key_dim
        )
        heads = None if fused else num_kv_heads
        key = _gather("key", key_cache, bucket, heads, batch.block_size, workspace, query.dtype)
        value = _gather(
            "value", value_cache, bucket, heads, batch.block_size, workspace, query.dtype
        )
        if fused:
            attended = _fused(bucketed, key, value, bucket, scale)
        else:
            attended = _explicit(bucketed, key, value, bucket, scale, softcap, sinks)
        attended = attended.reshape(-1, num_heads, value_dim)
        if bucket.kept is not None:
            attended = attended.index_select(0, bucket.kept)
        if whole:
            return attended.contiguous()
        if out is None:
            out = query.new_empty(num_tokens, num_heads, value_dim)
        if isinstance(rows, slice):
            out[rows] = attended
        else:
            out.index_copy_(0, rows, attended)
    assert out is not None  # a batch has at least one sequence
    return out


def _gather(
    name: str,
    cache: Tensor,
    bucket: LengthBucket,
    heads: int | None,
    block_size: int,
    workspace: AttentionWorkspace,
    dtype: torch.dtype,
) -> Tensor:
    """A bucket's keys or values, in full numbers.

    Args:
        name: of the scratch memory.
        cache: all of them.
        bucket: the length bucket.
        heads: key/value heads, where the result has one after another; None: all of each token.
        block_size: tokens in a block.
        workspace: of the step.
        dtype: of the result.

    Returns:
        [B * L, Hkv, D], or [B * Hkv * L, D].
    """
    rows = bucket.slots if heads is None else bucket.head_slots(heads)
    if cache.dtype == torch.uint8:
        slots, head = (rows, slice(None)) if heads is None else (rows // heads, rows % heads)
        place = slots // block_size, head, slots % block_size
        codes, exponents = fp8_parts(cache, block_size)
        return decode_fp8(codes[place], exponents[place], dtype)
    found = workspace.gather(name, cache.flatten(0, 1 if heads is None else 2), rows)
    return decode_kv(found, dtype) if cache.dtype == torch.int8 else found


def _fused(query: Tensor, key: Tensor, value: Tensor, bucket: LengthBucket, scale: float) -> Tensor:
    """Torch's fused attention of one bucket.

    Args:
        query: [B, Q, Hkv, G, D].
        key: [B * L, Hkv, D].
        value: [B * L, Hkv, D].
        bucket: the length bucket.
        scale: factor on the scores.

    Returns:
        [B, Q, Hkv, G, D].
    """
    num_sequences, query_len, num_kv_heads, queries_per_kv, head_dim = query.shape
    gathered = (num_sequences, bucket.kv_len, num_kv_heads, head_dim)
    key = key.view(gathered).transpose(1, 2)
    value = value.view(gathered).transpose(1, 2)
    if num_sequences == 1 and query_len > 1:
        # Key/value heads as the batch, their query heads as the heads: all views, one small mask.
        shape = (num_kv_heads, queries_per_kv, bucket.kv_len, head_dim)
        attended = scaled_dot_product_attention(
            query[0].permute(1, 2, 0, 3),
            key.transpose(0, 1).expand(shape),
            value.transpose(0, 1).expand(shape),
            attn_mask=None if bucket.is_causal else bucket.bias(query.dtype),
            is_causal=bucket.is_causal,
            scale=scale,
        )
        return attended.permute(2, 0, 1, 3)
    # The query heads of a key/value head are more query rows of that head.
    rows = query.permute(0, 2, 3, 1, 4).reshape(num_sequences, num_kv_heads, -1, head_dim)
    attended = scaled_dot_product_attention(
        rows, key, value, attn_mask=bucket.bias(query.dtype, queries_per_kv), scale=scale
    )
    split = (num_sequences, num_kv_heads, queries_per_kv, query_len, head_dim)
    return attended.reshape(split).permute(0, 3, 1, 2, 4)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: LengthBucket,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores, softmax and product of one bucket, one after another.

    Args:
        query: [B, Q, Hkv, G, Dk].
        key: [B * Hkv * L, Dk].
        value: [B * Hkv * L, Dv].
        bucket: the length bucket.
        scale: factor on the scores.
        softcap: bound of the scores, or None.
        sinks: [Hq], or None.

    Returns:
        [B, Q, Hkv, G, Dv].
    """
    num_sequences, query_len, num_kv_heads, queries_per_kv, key_dim = query.shape
    shape = (num_sequences * num_kv_heads, bucket.kv_len, -1)
    key, value = key.view(shape), value.view(shape)
    query = query.permute(0, 2, 3, 1, 4)
    bias = bucket.bias(torch.float32)
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, queries_per_kv, 1, 1)

    piece = max(1, MOST_SCORES // (shape[0] * queries_per_kv * bucket.kv_len))
    pieces = []
    for start in range(0, query_len, piece):
        rows = query[:, :, :, start : start + piece]
        scores = torch.bmm(rows.reshape(shape[0], -1, key_dim), key.transpose(1, 2))
        # From here in fp32, whatever the cache holds.
        scores = scores.float().view(*rows.shape[:-1], -1)
        if softcap is None:
            scores.mul_(scale)
        else:
            scores.mul_(scale / softcap).tanh_().mul_(softcap)
        if bias is not None:
            scores.add_(bias[:, :, None, start : start + piece])
        weights = scores.softmax(-1).to(query.dtype)
        attended = torch.bmm(weights.view(shape[0], -1, bucket.kv_len), value)
        attended = attended.view(*rows.shape[:-1], -1)
        if sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)): the sink in the denominator, without overflow.
            attended = attended * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()
        pieces.append(attended.to(query.dtype))
    attended = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=3)
    return attended.permute(0, 3, 1, 2, 4)

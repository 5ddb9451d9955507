"""Paged attention in plain torch: the CPU path, and that of any device without Triton.

Per group of the batch: gather keys and values through the block tables, then either torch's fused
attention or, for what that cannot express, scores, softmax and product one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ._groups import Group
from .ragged import RaggedBatch

# The explicit path holds a score per query, head and key; a long prefill is cut into pieces of at
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
) -> Tensor:
    """See ``paged_attention.paged_attention``, which has checked the arguments."""
    num_tokens, num_heads, _ = query.shape
    _, _, num_kv_heads, key_dim = key_cache.shape
    value_dim = value_cache.shape[-1]
    fused = softcap is None and sinks is None and key_dim == value_dim
    groups = batch.groups(window, num_kv_heads * key_dim * key_cache.element_size())

    out: Tensor | None = None
    for group in groups:
        rows = group.rows
        whole = group.num_rows == num_tokens
        if group.padded_rows is not None:
            grouped = query.index_select(0, group.padded_rows)
        elif whole:
            grouped = query
        elif isinstance(rows, slice):
            grouped = query[rows]
        else:
            grouped = query.index_select(0, rows)
        # [B, Q, Hkv, G, D]: query heads of one key/value head stand together, so that GQA is a
        # matter of shape and no key is ever repeated.
        grouped = grouped.reshape(
            group.num_sequences, group.query_len, num_kv_heads, num_heads // num_kv_heads, key_dim
        )
        if fused:
            slots = group.slots
            key = batch.gather("key", key_cache.flatten(0, 1), slots)
            value = batch.gather("value", value_cache.flatten(0, 1), slots)
            attended = _fused(grouped, key, value, group, scale)
        else:
            slots = group.head_slots(num_kv_heads)
            key = batch.gather("key", key_cache.view(-1, key_dim), slots)
            value = batch.gather("value", value_cache.view(-1, value_dim), slots)
            attended = _explicit(grouped, key, value, group, scale, softcap, sinks)
        attended = attended.reshape(-1, num_heads, value_dim)
        if group.kept is not None:
            attended = attended.index_select(0, group.kept)
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


def _fused(query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float) -> Tensor:
    """Torch's fused attention of one group.

    Args:
        query: [B, Q, Hkv, G, D].
        key: [B * L, Hkv, D].
        value: [B * L, Hkv, D].
        group: the group.
        scale: factor on the scores.

    Returns:
        [B, Q, Hkv, G, D].
    """
    num_sequences, query_len, num_kv_heads, queries_per_kv, head_dim = query.shape
    gathered = (num_sequences, group.kv_len, num_kv_heads, head_dim)
    key = key.view(gathered).transpose(1, 2)
    value = value.view(gathered).transpose(1, 2)
    if num_sequences == 1 and query_len > 1:
        # Key/value heads as the batch, their query heads as the heads: all views, one small mask.
        shape = (num_kv_heads, queries_per_kv, group.kv_len, head_dim)
        attended = scaled_dot_product_attention(
            query[0].permute(1, 2, 0, 3),
            key.transpose(0, 1).expand(shape),
            value.transpose(0, 1).expand(shape),
            attn_mask=None if group.is_causal else group.bias(query.dtype),
            is_causal=group.is_causal,
            scale=scale,
        )
        return attended.permute(2, 0, 1, 3)
    # The query heads of a key/value head are more query rows of that head.
    rows = query.permute(0, 2, 3, 1, 4).reshape(num_sequences, num_kv_heads, -1, head_dim)
    attended = scaled_dot_product_attention(
        rows, key, value, attn_mask=group.bias(query.dtype, queries_per_kv), scale=scale
    )
    split = (num_sequences, num_kv_heads, queries_per_kv, query_len, head_dim)
    return attended.reshape(split).permute(0, 3, 1, 2, 4)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores, softmax and product of one group, one after another.

    Args:
        query: [B, Q, Hkv, G, Dk].
        key: [B * Hkv * L, Dk].
        value: [B * Hkv * L, Dv].
        group: the group.
        scale: factor on the scores.
        softcap: bound of the scores, or None.
        sinks: [Hq], or None.

    Returns:
        [B, Q, Hkv, G, Dv].
    """
    num_sequences, query_len, num_kv_heads, queries_per_kv, key_dim = query.shape
    shape = (num_sequences * num_kv_heads, group.kv_len, -1)
    key, value = key.view(shape), value.view(shape)
    query = query.permute(0, 2, 3, 1, 4)
    bias = group.bias(torch.float32)
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, queries_per_kv, 1, 1)

    piece = max(1, MOST_SCORES // (shape[0] * queries_per_kv * group.kv_len))
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
        attended = torch.bmm(weights.view(shape[0], -1, group.kv_len), value)
        attended = attended.view(*rows.shape[:-1], -1)
        if sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)): the sink in the denominator, without overflow.
            attended = attended * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()
        pieces.append(attended.to(query.dtype))
    attended = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=3)
    return attended.permute(0, 3, 1, 2, 4)

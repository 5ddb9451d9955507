"""Plain statements of what the kernels compute, one token at a time, and caches to try them on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels import RaggedBatch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """A batch with its cache and the contiguous keys and values each sequence stands for."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: RaggedBatch
    keys: list[Tensor]
    values: list[Tensor]


def make_batch(
    query_lens: list[int], context_lens: list[int], block_size: int, *, seed: int = 0
) -> tuple[RaggedBatch, list[list[int]]]:
    """A batch over shuffled blocks, no two sequences sharing one, and its block tables."""
    counts = [-(-context // block_size) for context in context_lens]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables: list[list[int]] = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return RaggedBatch.from_lists(query_lens, context_lens, tables, block_size=block_size), tables


def make_case(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random queries, and caches that are NaN wherever no sequence has written."""
    batch, tables = make_batch(query_lens, context_lens, block_size, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = sum(map(len, tables)) + 3
    shape = (num_blocks, block_size, kv_heads)
    key_cache = torch.full((*shape, key_dim), float("nan"), dtype=dtype)
    value_cache = torch.full((*shape, value_dim), float("nan"), dtype=dtype)
    keys, values = [], []
    for context, table in zip(context_lens, tables, strict=True):
        key, value = random(context, kv_heads, key_dim), random(context, kv_heads, value_dim)
        for position in range(context):
            block, offset = table[position // block_size], position % block_size
            key_cache[block, offset] = key[position]
            value_cache[block, offset] = value[position]
        keys.append(key)
        values.append(value)
    query = random(sum(query_lens), heads, key_dim)
    return Case(query, key_cache, value_cache, batch, keys, values)


def reference_attention(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, Hq, Dv] in float64, one query token and head at a time."""
    rows = case.query.double()
    heads = rows.shape[1]
    out = []
    row = 0
    lengths = zip(case.batch.host_query_lens, case.batch.host_context_lens, strict=True)
    for sequence, (query_len, context) in enumerate(lengths):
        keys, values = case.keys[sequence].double(), case.values[sequence].double()
        group = heads // keys.shape[1]
        for position in range(context - query_len, context):
            first = 0 if window is None else max(0, position - window + 1)
            per_head = []
            for head in range(heads):
                key = keys[first : position + 1, head // group]
                value = values[first : position + 1, head // group]
                scores = key @ rows[row, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().view(1)])
                weights = torch.softmax(scores, 0)[: len(value)]
                per_head.append(weights @ value)
            out.append(torch.stack(per_head))
            row += 1
    return torch.stack(out)


def slid(case: Case, window: int) -> Case:
    """The case with tables in which blocks before the window of a sequence's queries are gone.

    Whoever reads one all the same reads NaN: id -1 leads to a block before the caches' first.
    """
    batch = case.batch
    size, tables = batch.block_size, []
    for table, query, context in zip(
        batch.host_block_tables.tolist(),
        batch.host_query_lens,
        batch.host_context_lens,
        strict=True,
    ):
        gone = max(0, context - query - window + 1) // size
        tables.append([-1] * gone + table[gone:])
    caches = []
    for cache in (case.key_cache, case.value_cache):
        guarded = torch.full_like(cache[:1], float("nan")).repeat(len(cache) + 1, 1, 1, 1)
        guarded[1:] = cache
        caches.append(guarded[1:])
    lens = batch.host_query_lens, batch.host_context_lens
    slid_batch = RaggedBatch.from_lists(*lens, tables, block_size=size, window=window)
    return replace(case, key_cache=caches[0], value_cache=caches[1], batch=slid_batch)

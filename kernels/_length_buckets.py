"""Length buckets of the torch path: few large operations instead of one per sequence.

On the CPU a layer of a small model costs dispatch, not arithmetic. Sequences of similar lengths are
therefore computed together, with queries and keys padded to common lengths. A bucket holds all that
does not depend on a layer's values: the slots to gather and the keys each query may see. It is laid
out once per step and window.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Longer queries are computed alone: they amortise their own dispatch, and alone they need no copy
# of the query and no padding of the context.
LONGEST_BATCHED_QUERY = 16

# One more bucket costs 20 to 40 us of dispatch a layer. Gathering and multiplying this many bytes
# of padding keys costs about the same (measured with fp32 on Zen 4 and on a Xeon). So does
# multiplying twice as many bytes of keys by padding queries.
PADDING_BYTES = 256 * 1024

# Keys gathered for one bucket should still be in the processor's cache when they are multiplied.
# Beyond this size one bucket was measured to be 1.3 to 1.7 times slower than several.
BUCKET_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class LengthBucket:
    """``B`` sequences, their queries padded to ``Q`` tokens and their keys to ``L`` positions.

    Attributes:
        num_sequences: ``B``.
        query_len: ``Q``.
        kv_len: ``L``.
        rows: the packed rows of the queries, [R] in order of sequence and position; a slice where
            they are contiguous.
        num_rows: ``R``.
        padded_rows: the packed row of each of the [B * Q] queries; a padding query repeats its
            sequence's last row. None without padding.
        kept: indices of the [B * Q] queries that are no padding, [R]. None without padding.
        slots: int64 [B * L], the slot of each key position. A padding position repeats the
            sequence's last slot, so that nothing unwritten is ever read (0 * NaN is NaN).
        visible: bool [B, Q, L], the keys each query may see; None where every query sees all.
        is_causal: ``visible`` is one sequence's plain lower triangle.
    """

    num_sequences: int
    query_len: int
    kv_len: int
    rows: slice | Tensor
    num_rows: int
    padded_rows: Tensor | None
    kept: Tensor | None
    slots: Tensor
    visible: Tensor | None
    is_causal: bool
    _biases: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, repr=False)
    _head_slots: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def bias(self, dtype: torch.dtype, repeats: int = 1) -> Tensor | None:
        """[B, 1, repeats * Q, L] to add to the scores: 0 where visible, -inf elsewhere."""
        if self.visible is None:
            return None
        bias = self._biases.get((dtype, repeats))
        if bias is None:
            bias = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            bias.masked_fill_(~self.visible, float("-inf"))
            bias = bias.unsqueeze(1).repeat(1, 1, repeats, 1)
            self._biases[dtype, repeats] = bias
        return bias

    def head_slots(self, num_heads: int) -> Tensor:
        """int64 [B * num_heads * L], rows of a cache viewed as [num_slots * num_heads, D].

        Gathering with it yields [B, num_heads, L, D] without a transposition.
        """
        index = self._head_slots.get(num_heads)
        if index is None:
            heads = torch.arange(num_heads, device=self.slots.device)
            slots = self.slots.view(self.num_sequences, 1, self.kv_len)
            index = (slots * num_heads + heads[:, None]).flatten()
            self._head_slots[num_heads] = index
        return index


def build_buckets(
    *,
    query_lens: Sequence[int],
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
    block_size: int,
    window: int | None,
    key_bytes: int,
    device: torch.device,
) -> tuple[LengthBucket, ...]:
    """Partition a step's sequences into buckets; every packed row is in exactly one.

    Args:
        query_lens: S query lengths in tokens.
        query_starts: first packed row of each sequence.
        context_lens: S context lengths in tokens, the query included.
        block_tables: int32 [S, B] on the host.
        block_size: tokens per block.
        window: sliding window in tokens, or None.
        key_bytes: size of one token's keys in one layer.
        device: where the buckets' tensors go.
    """
    # Keys before `first` are out of every query's window and are not even gathered.
    first = [
        0 if window is None else max(0, context - query - window + 1)
        for query, context in zip(query_lens, context_lens, strict=True)
    ]
    kv_lens = [context - start for context, start in zip(context_lens, first, strict=True)]
    buckets = []
    for members in _partition(query_lens, kv_lens, key_bytes):
        lens = [query_lens[index] for index in members]
        query_len, kv_len = max(lens), max(kv_lens[index] for index in members)
        starts = [query_starts[index] for index in members]
        flat = array("q", members)
        for values in (first, context_lens, query_lens):
            flat.extend(values[i] for i in members)
        facts = torch.frombuffer(flat, dtype=torch.int64).view(4, -1)
        slots = _slots(block_tables, facts, kv_len, block_size)
        inert = window is None or max(context_lens[index] for index in members) <= window
        is_causal = len(members) == 1 and query_len == kv_len and inert
        visible = None
        if query_len > 1 or min(kv_lens[index] for index in members) < kv_len:
            visible = _visible(facts, query_len, kv_len, None if inert else window).to(device)
        padded_rows = kept = None
        if sum(lens) < len(lens) * query_len:
            padded_rows, kept = _padded(starts, lens, query_len)
        buckets.append(
            LengthBucket(
                num_sequences=len(members),
                query_len=query_len,
                kv_len=kv_len,
                rows=_rows(starts, lens, device),
                num_rows=sum(lens),
                padded_rows=None if padded_rows is None else padded_rows.to(device),
                kept=None if kept is None else kept.to(device),
                slots=slots.to(device),
                visible=visible,
                is_causal=is_causal,
            )
        )
    return tuple(buckets)


def _partition(
    query_lens: Sequence[int], kv_lens: Sequence[int], key_bytes: int
) -> list[list[int]]:
    """Sequence indices by bucket, ascending within each.

    Walks the sequences from the longest query and context down. The first member of a bucket fixes
    its lengths. The bucket is closed when its padding costs as much as one more bucket, or when
    queries become shorter. Then neighbours are joined where the added padding costs less than a
    bucket.
    """
    most_padding = PADDING_BYTES // key_bytes
    most_tokens = BUCKET_BYTES // key_bytes
    order = sorted(range(len(kv_lens)), key=lambda i: (query_lens[i], kv_lens[i]), reverse=True)
    buckets: list[list[int]] = []
    query_len = longest = padding = 0
    for index in order:
        padding += longest - kv_lens[index]
        joins = (
            query_lens[index] == query_len <= LONGEST_BATCHED_QUERY
            and padding <= most_padding
            and (len(buckets[-1]) + 1) * longest <= most_tokens
        )
        if joins:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            query_len, longest, padding = query_lens[index], kv_lens[index], 0
    if len(buckets) > 1 and query_lens[order[0]] != query_lens[order[-1]]:
        buckets = _join_buckets(buckets, query_lens, kv_lens, most_padding, most_tokens)
    for bucket in buckets:
        bucket.sort()
    return buckets


def _join_buckets(
    buckets: list[list[int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    most_padding: int,
    most_tokens: int,
) -> list[list[int]]:
    """Join buckets of one query length each, longest queries first, to buckets of several lengths.

    A padding query counts as half of the keys it is multiplied with.
    """
    result: list[list[int]] = []
    query_len = longest = 0
    for bucket in buckets:
        its_query_len, its_longest = query_lens[bucket[0]], kv_lens[bucket[0]]
        if result and its_query_len < query_len <= LONGEST_BATCHED_QUERY:
            most, size = max(longest, its_longest), len(result[-1])
            added = size * (most - longest) + len(bucket) * (most - its_longest)
            added += len(bucket) * (query_len - its_query_len) * most // 2
            if added <= most_padding and (size + len(bucket)) * most <= most_tokens:
                result[-1] += bucket
                longest = most
                continue
        result.append(bucket)
        query_len, longest = its_query_len, its_longest
    return result


def _rows(starts: Sequence[int], lens: Sequence[int], device: torch.device) -> slice | Tensor:
    if starts[-1] + lens[-1] - starts[0] == sum(lens):
        return slice(starts[0], starts[-1] + lens[-1])
    rows = [
        row
        for start, count in zip(starts, lens, strict=True)
        for row in range(start, start + count)
    ]
    return torch.tensor(rows, device=device)


def _padded(starts: Sequence[int], lens: Sequence[int], query_len: int) -> tuple[Tensor, Tensor]:
    """See :class:`LengthBucket`: its padded rows, and those kept."""
    place, count = torch.arange(query_len), torch.tensor(lens)[:, None]
    rows = torch.tensor(starts)[:, None] + torch.minimum(place, count - 1)
    return rows.flatten(), (place < count).flatten().nonzero().squeeze(1)


def _slots(block_tables: Tensor, facts: Tensor, kv_len: int, block_size: int) -> Tensor:
    """int64 [B * kv_len]; ``facts`` holds the rows sequence, first position, context, query."""
    members, first, context, _ = facts[:, :, None]
    positions = torch.minimum(first + torch.arange(kv_len), context - 1)
    blocks = block_tables[members, positions // block_size]
    return (blocks.to(torch.int64) * block_size + positions % block_size).flatten()


def _visible(facts: Tensor, query_len: int, kv_len: int, window: int | None) -> Tensor:
    """Bool [B, query_len, kv_len]: a key is visible up to its query, within the window."""
    _, first, context, count = facts[:, :, None, None]
    query = torch.minimum(context - count + torch.arange(query_len)[:, None], context - 1)
    key = first + torch.arange(kv_len)
    visible: Tensor = key <= query
    return visible if window is None else visible & (key > query - window)

"""What the torch path of paged attention keeps between the layers of one step.

The Triton path needs none of it: its kernel reads the block tables itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._length_buckets import LengthBucket, build_buckets
from .ragged import RaggedBatch


class AttentionWorkspace:
    """Length buckets and scratch memory, shared by the layers of one step.

    Make one for each step and drop it afterwards: it keeps the step's batches and as much memory
    as one layer gathers.
    """

    __slots__ = ("_buckets", "_scratch")

    def __init__(self) -> None:
        self._buckets: dict[tuple[RaggedBatch, int | None, int], tuple[LengthBucket, ...]] = {}
        self._scratch: dict[str, Tensor] = {}

    def buckets(
        self, batch: RaggedBatch, window: int | None, key_bytes: int
    ) -> tuple[LengthBucket, ...]:
        """The batch's sequences by length; computed once for all layers with the same arguments.

        Args:
            batch: the packed layout.
            window: sliding window in tokens, or None.
            key_bytes: size of one token's keys in one layer. It decides how much padding is worth
                saving one more bucket.
        """
        if window is not None and window >= batch.max_context_len:
            window = None  # inert in this step: share the full layers' buckets
        cached = self._buckets.get((batch, window, key_bytes))
        if cached is None:
            cached = build_buckets(
                query_lens=batch.host_query_lens,
                query_starts=batch.host_query_starts,
                context_lens=batch.host_context_lens,
                block_tables=batch.host_block_tables,
                block_size=batch.block_size,
                window=window,
                key_bytes=key_bytes,
                device=batch.slots.device,
            )
            self._buckets[batch, window, key_bytes] = cached
        return cached

    def gather(self, name: str, source: Tensor, index: Tensor) -> Tensor:
        """``source[index]`` in scratch memory, overwritten by the next gather of that ``name``.

        The layers of a step gather megabytes each. Fresh memory for each would return to the system
        and fault in again page by page, at several times the cost of the copy.
        """
        needed = index.numel() * (source.numel() // source.shape[0])
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < needed or scratch.dtype != source.dtype:
            # An inference tensor could not be written again outside inference mode.
            with torch.inference_mode(False):
                scratch = torch.empty(needed, dtype=source.dtype, device=source.device)
            self._scratch[name] = scratch
        out = scratch[:needed].view(-1, *source.shape[1:])
        return torch.index_select(source, 0, index, out=out)

"""A few tokens of which a model's own logits are known, to try other ways of computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forward.batch import PackedStep, Rows, SequenceChunk, pack
from ..kv.kv_pool import KVPool
from .geometry import KVGeometry

__all__ = ["BLOCK_SIZE", "ROUTED_SHARE", "Trial", "are_within"]

BLOCK_SIZE = 8
_SELECTED = 24

ROUTED_SHARE = 0.25
"""Share of the tokens that may differ by more in half precision, where a model has experts.

Rounding moves a token to another expert when its router scores the two nearly alike.
"""

Forward = Callable[[PackedStep, KVPool], Tensor]
"""Computes a packed step over a paged pool; returns the wanted rows' logits."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Two sequences and their logits.

    They go through the pool in three steps. First one whole beside the begin of the other, then the
    other's middle, then its last token beside a repeated one.

    Attributes:
        one: token ids.
        two: token ids, not more.
        expected: the logits of all their tokens, ``[tokens, vocab]`` each.
        device: of the KV pool.
        dtype: of the KV pool.
    """

    one: list[int]
    two: list[int]
    expected: list[Tensor]
    device: torch.device
    dtype: torch.dtype

    @torch.inference_mode()
    def differences(self, forward: Forward, geometry: KVGeometry) -> list[Tensor]:
        """How far each token's logits are off: the L2 norm of the difference, relative.

        Args:
            forward: the way to try.
            geometry: of its KV.

        Returns:
            For each sequence ``[tokens]``.
        """
        found = self._paged_logits(forward, geometry)
        return [_relative_difference(*pair) for pair in zip(found, self.expected, strict=True)]

    @torch.inference_mode()
    def selection_difference(self, forward: Forward, geometry: KVGeometry) -> float:
        """How far the logits of some tokens alone are from the same tokens' among those of all.

        Both steps compute the same tokens, so the rows agree to rounding whatever a model routes.
        """
        one, two = self.one[:_SELECTED], self.two[:_SELECTED]
        blocks = -(-len(one) // BLOCK_SIZE)
        pool = KVPool(geometry, 3 * blocks, BLOCK_SIZE, self.device, self.dtype)
        tables = [range(start, start + blocks) for start in (0, blocks, 2 * blocks)]

        def logits(rows: Sequence[Rows]) -> Tensor:
            parts = zip((one, two, one[::-1]), tables, rows, strict=True)
            chunks = [SequenceChunk(ids, 0, [table], wanted) for ids, table, wanted in parts]
            return forward(pack(chunks, pool), pool).float()

        last = logits((Rows.LAST, Rows.NONE, Rows.LAST))
        every = logits((Rows.ALL, Rows.ALL, Rows.ALL))
        return float(_relative_difference(last, every[[len(one) - 1, -1]]).max())

    def _paged_logits(self, forward: Forward, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """Logits of all tokens of both sequences, by three packed steps."""
        one, two = self.one, self.two
        blocks = -(-len(one) // BLOCK_SIZE)
        pool = KVPool(geometry, 2 * blocks, BLOCK_SIZE, self.device, self.dtype)
        # Interleaved and backwards, so that nothing is right by lying in order.
        first, second = (list(range(2 * blocks - 1 - part, -1, -2)) for part in (0, 1))
        split, last = len(two) // 2, len(two) - 1
        steps = (
            (
                SequenceChunk(one, 0, [first], Rows.ALL),
                SequenceChunk(two[:split], 0, [second], Rows.ALL),
            ),
            (SequenceChunk(two[split:last], split, [second], Rows.ALL),),
            (
                SequenceChunk(two[last:], last, [second], Rows.ALL),
                SequenceChunk(one[-1:], len(one) - 1, [first], Rows.ALL),
            ),
        )
        begin, middle, end = (forward(pack(chunks, pool), pool).float() for chunks in steps)
        # The last token of the first sequence was computed twice: whole, and alone over stored KV.
        return (
            torch.cat([begin[: len(one) - 1], end[1:]]),
            torch.cat([begin[len(one) :], middle, end[:1]]),
        )


def are_within(differences: Sequence[Tensor], tolerance: float, share: float) -> bool:
    """Whether tokens differ by at most ``tolerance``, but for a ``share`` of them.

    NaN is not within. The share holds for the last tokens apart, too: only they may lie past a
    window.

    Args:
        differences: from :meth:`Trial.differences`.
        tolerance: relative.
        share: of the tokens of a sequence, 0 to 1.
    """
    groups = [*differences, *(difference[-BLOCK_SIZE:] for difference in differences)]
    return all(float((~(group <= tolerance)).float().mean()) <= share for group in groups)


def _relative_difference(found: Tensor, expected: Tensor) -> Tensor:
    """L2 norm of the difference over that of the expected logits, per row, free of their mean."""
    centred = expected - expected.mean(dim=-1, keepdim=True)
    difference = (found - found.mean(dim=-1, keepdim=True)) - centred
    size: Tensor = centred.norm(dim=-1)
    ratio: Tensor = difference.norm(dim=-1) / size.clamp_min(1e-12)
    return ratio

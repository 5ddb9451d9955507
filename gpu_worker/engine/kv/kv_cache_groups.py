"""KV cache groups: layers with the same window keep the same tokens, in a pool of their own."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_BLOCK", "KVCacheGroup", "first_seen_block", "most_blocks_held"]

NO_BLOCK = -1
"""Stands in a block table where the block has left the window. Never read."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """The pool of all layers with one window.

    Attributes:
        num_blocks: KV blocks in the pool.
        window: a token sees itself and the ``window - 1`` tokens before it; None: all of them.
        num_host_blocks: blocks of host memory for what preempted sequences have in this pool.
        block_bytes: bytes of a block, to be counted when it is swapped.
    """

    num_blocks: int
    window: int | None = None
    num_host_blocks: int = 0
    block_bytes: int = 0


def first_seen_block(position: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the token at ``position``, or any after it, still sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def most_blocks_held(window: int, max_span: int, block_size: int) -> int:
    """Most blocks that one sequence of any length ever holds at the same time.

    Positions in use are the ``window - 1`` before the step and those of the step. Up to
    ``block_size - 1`` more have left the window since a block was last filled. They may begin at
    the last position of a block.

    Args:
        window: of the layers, in tokens.
        max_span: most query tokens of one sequence in one step.
        block_size: tokens per block.
    """
    num_positions = (window - 1) + (block_size - 1) + max_span
    return 1 + -(-(num_positions - 1) // block_size)

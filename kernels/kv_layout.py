"""How one block of the paged cache lies in memory.

Blocks are copied, swapped and shared as units, so only what reads and writes single tokens must
know more than a block's shape: the functions of :mod:`penstock.kernels` know ``TOKENS``, the native
library of :mod:`penstock.kernels.cpu` knows ``GROUPS``.
"""

from __future__ import annotations

import math
from enum import Enum

import torch

__all__ = ["KVLayout"]

_GROUP = 16


class KVLayout(Enum):
    """A layout of keys and values.

    Attributes:
        TOKENS: token after token, ``[block_size, Hkv, D]`` each.
        GROUPS: head after head, in groups of 16 tokens. Keys are transposed, as attention on a CPU
            reads them: ``[Hkv, groups, Dk, 16]``, or in bfloat16 ``[Hkv, groups, Dk / 2, 16, 2]``.
            Values are ``[Hkv, groups, 16, Dv]``, ``Dv`` rounded up to a multiple of 16. The last
            group of a block whose size is no multiple of 16 has unused places.
    """

    TOKENS = "tokens"
    GROUPS = "groups"

    def key_shape(
        self, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Shape of the keys of one block.

        Args:
            block_size: tokens in a block.
            heads: key/value heads.
            dim: of a key.
            dtype: of the cache.
        """
        if self is KVLayout.TOKENS:
            return block_size, heads, dim
        groups = -(-block_size // _GROUP)
        if dtype.itemsize == 2:
            return heads, groups, -(-dim // 2), _GROUP, 2
        return heads, groups, dim, _GROUP

    def value_shape(self, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Shape of the values of one block; ``dim`` is a value's."""
        if self is KVLayout.TOKENS:
            return block_size, heads, dim
        return heads, -(-block_size // _GROUP), _GROUP, -(-dim // _GROUP) * _GROUP

    def elements(
        self, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Numbers in the keys and values of one block."""
        return math.prod(self.key_shape(block_size, heads, key_dim, dtype)) + math.prod(
            self.value_shape(block_size, heads, value_dim)
        )

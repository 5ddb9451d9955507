"""How one block of the paged cache lies in memory.

Blocks are copied, swapped and shared as units. So only code that reads or writes single tokens must
know more than a block's shape. The functions of :mod:`penstock.kernels` know ``TOKENS``, the native
library of :mod:`penstock.kernels.cpu` knows ``GROUPS``. Either knows its form in 8 bits, too.

Formula of 8 bits, for a token's key or value ``x`` of one head, ``[D]``::

    scale = max |x| / 127, rounded up to bfloat16
    row = int8(round(x / scale)), ties to even; then the two bytes of scale

So a number is at most half a scale off, an outlier harms only its own row, and a row's bits depend
on its token alone. What is not finite makes its row not finite.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

__all__ = ["SCALE_BYTES", "KVLayout", "decode_kv", "encode_kv"]

SCALE_BYTES = 2
_GROUP = 16
_MOST = 127


class KVLayout(Enum):
    """A layout of keys and values.

    Attributes:
        TOKENS: token after token, ``[block_size, Hkv, D]`` each.
        GROUPS: head after head, in groups of 16 tokens. Keys are transposed, as attention on a CPU
            reads them: ``[Hkv, groups, Dk, 16]``, or in bfloat16 ``[Hkv, groups, Dk / 2, 16, 2]``.
            Values are ``[Hkv, groups, 16, Dv]``, ``Dv`` rounded up to a multiple of 16. The last
            group of a block whose size is no multiple of 16 has unused places.
        TOKENS_INT8: as ``TOKENS``, in 8 bits with a scale behind each head's numbers
            (:func:`encode_kv`): ``[block_size, Hkv, D + 2]`` bytes.
        GROUPS_INT8: as ``GROUPS`` in float32, in 8 bits with the 16 scales behind each group.
    """

    TOKENS = "tokens"
    GROUPS = "groups"
    TOKENS_INT8 = "tokens_int8"
    GROUPS_INT8 = "groups_int8"

    @property
    def in_8_bits(self) -> bool:
        """Whether numbers are stored in 8 bits, whatever the model computes in."""
        return self in (KVLayout.TOKENS_INT8, KVLayout.GROUPS_INT8)

    @property
    def int8(self) -> KVLayout:
        """The same layout in 8 bits."""
        if self in (KVLayout.TOKENS, KVLayout.TOKENS_INT8):
            return KVLayout.TOKENS_INT8
        return KVLayout.GROUPS_INT8

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the tensors that hold the cache of a model that computes in ``dtype``."""
        return torch.int8 if self.in_8_bits else dtype

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
        groups = -(-block_size // _GROUP)
        match self:
            case KVLayout.TOKENS:
                return block_size, heads, dim
            case KVLayout.TOKENS_INT8:
                return block_size, heads, dim + SCALE_BYTES
            case KVLayout.GROUPS_INT8:
                return heads, groups, dim + SCALE_BYTES, _GROUP
        if dtype.itemsize == 2:
            return heads, groups, -(-dim // 2), _GROUP, 2
        return heads, groups, dim, _GROUP

    def value_shape(self, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Shape of the values of one block; ``dim`` is a value's."""
        if self.int8 is KVLayout.TOKENS_INT8:
            return block_size, heads, dim + (SCALE_BYTES if self.in_8_bits else 0)
        padded = -(-dim // _GROUP) * _GROUP
        rows = padded + (SCALE_BYTES if self.in_8_bits else 0)
        return heads, -(-block_size // _GROUP), _GROUP, rows

    def elements(
        self, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Numbers in the keys and values of one block."""
        return math.prod(self.key_shape(block_size, heads, key_dim, dtype)) + math.prod(
            self.value_shape(block_size, heads, value_dim)
        )


def encode_kv(states: Tensor) -> Tensor:
    """Round keys or values to 8 bits.

    Args:
        states: ``[..., D]``, floating point.

    Returns:
        int8 ``[..., D + 2]``, contiguous.
    """
    wide = states.float()
    bits = (wide.abs().amax(-1, keepdim=True) / _MOST).view(torch.int32)
    scale = ((bits + 0xFFFF) >> 16).to(torch.int16)
    factor = scale.view(torch.bfloat16).float()
    # Zeros stay zeros, and a scale that is not finite needs no codes.
    factor = torch.where(factor > 0, factor, torch.inf)
    codes = (wide / factor).round_().nan_to_num_(nan=0.0)
    return torch.cat([codes.to(torch.int8), scale.view(torch.int8)], dim=-1)


def decode_kv(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`encode_kv`'s rows stand for.

    Args:
        rows: int8 ``[..., D + 2]``.
        dtype: of the result.

    Returns:
        ``[..., D]``, contiguous.
    """
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()
    return (rows[..., :-SCALE_BYTES].float() * scale).to(dtype)

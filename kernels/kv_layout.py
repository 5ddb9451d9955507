"""How one block of the paged cache lies in memory.

Blocks are copied, swapped and shared as units. So only code that reads or writes single tokens must
know more than a block's shape. The functions of :mod:`penstock.kernels` know ``TOKENS``, the native
library of :mod:`penstock.kernels.cpu` knows ``GROUPS``. Either knows its form in ``int8``, and the
former know ``HEADS_FP8``.

Formula of ``int8``, for a token's key or value ``x`` of one head, ``[D]``::

    scale = max |x| / 127, rounded up to bfloat16
    row = int8(round(x / scale)), ties to even; then the two bytes of scale

So a number is at most half a scale off, an outlier harms only its own row, and a row's bits depend
on its token alone. What is not finite makes its row not finite.

Formula of ``fp8``, of the same ``x``::

    e = the least with max |x| <= 448 * 2**(e - 127), at least 1
    row = e4m3(x / 2**(e - 127)), ties to even; and the byte e

e4m3 has a sign, four bits of exponent and three of mantissa, and 448 is its largest number. So a
number is at most 1/16 off, however small it is against its row's largest, down to 1/14,000 of
that. What is not finite makes ``e`` 255, which stands for infinity, and its row not finite.

Why a power of two: it changes no mantissa, so a scale with more bits would not be more exact. It
takes one byte, and what a row stands for is a bfloat16, exactly. Why a scale at all: without one
keys beyond 448, which some models have, would be cut off, or scales be measured beforehand. Why by
hand, and not by a GPU's instructions: those begin with compute capability 8.9.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "SCALE_BYTES", "CacheShape", "KVLayout", "decode_fp8", "decode_kv", "encode_fp8", "encode_kv",
    "fp8_parts",
]  # fmt: skip

SCALE_BYTES = 2
_GROUP = 16
_MOST = 127
_INFINITY = 0x7F800000  # the bits of a float32
_MANTISSA_OF_448 = 0x600000  # 448 is 1.75 * 2**8


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
        HEADS_FP8: head after head, ``[Hkv, block_size * (D + 1)]`` bytes: a head's numbers
            ``[block_size, D]``, then the scale of each token. So a GPU reads numbers in whole
            words, which a scale behind each token's would put out of step.
    """

    TOKENS = "tokens"
    GROUPS = "groups"
    TOKENS_INT8 = "tokens_int8"
    GROUPS_INT8 = "groups_int8"
    HEADS_FP8 = "heads_fp8"

    @property
    def number_format(self) -> Literal["int8", "fp8"] | None:
        """Of the 8 bits in which numbers are stored; None: in what the model computes in."""
        if self is KVLayout.HEADS_FP8:
            return "fp8"
        return "int8" if self in (KVLayout.TOKENS_INT8, KVLayout.GROUPS_INT8) else None

    def in_format(self, number_format: str) -> KVLayout:
        """What this layout of full numbers is in ``int8`` or ``fp8``; itself in ``auto``.

        Raises:
            ValueError: it has no such form.
        """
        if number_format == "auto":
            return self
        found = _FORMS.get((self, number_format))
        if found is None:
            raise ValueError(f"{self.value} has no form in {number_format}")
        return found

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the tensors that hold the cache of a model that computes in ``dtype``."""
        match self.number_format:
            case "int8":
                return torch.int8
            case "fp8":
                return torch.uint8
        return dtype

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
            case KVLayout.HEADS_FP8:
                return heads, block_size * (dim + 1)
        if dtype.itemsize == 2:
            return heads, groups, -(-dim // 2), _GROUP, 2
        return heads, groups, dim, _GROUP

    def value_shape(self, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Shape of the values of one block; ``dim`` is a value's."""
        scale = SCALE_BYTES if self.number_format == "int8" else 0
        if self in (KVLayout.TOKENS, KVLayout.TOKENS_INT8):
            return block_size, heads, dim + scale
        if self is KVLayout.HEADS_FP8:
            return heads, block_size * (dim + 1)
        padded = -(-dim // _GROUP) * _GROUP
        return heads, -(-block_size // _GROUP), _GROUP, padded + scale

    def elements(
        self, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Numbers in the keys and values of one block."""
        return math.prod(self.key_shape(block_size, heads, key_dim, dtype)) + math.prod(
            self.value_shape(block_size, heads, value_dim)
        )


_FORMS = {
    (KVLayout.TOKENS, "int8"): KVLayout.TOKENS_INT8,
    (KVLayout.GROUPS, "int8"): KVLayout.GROUPS_INT8,
    (KVLayout.TOKENS, "fp8"): KVLayout.HEADS_FP8,
}


class CacheShape(NamedTuple):
    """What a cache holds that the functions of :mod:`penstock.kernels` read and write.

    Attributes:
        blocks: in the cache.
        block_size: tokens in a block.
        heads: key/value heads.
        dim: of a key or value.
    """

    blocks: int
    block_size: int
    heads: int
    dim: int

    @classmethod
    def of(cls, cache: Tensor, block_size: int) -> CacheShape:
        """Read it off a cache in ``TOKENS``, ``TOKENS_INT8`` or ``HEADS_FP8``.

        Args:
            cache: which of them, its dtype says: int8, or uint8 for ``HEADS_FP8``.
            block_size: tokens in a block, which a cache in ``HEADS_FP8`` does not tell.

        Raises:
            ValueError: it is none of these.
        """
        if cache.dtype == torch.uint8 and cache.ndim == 3 and not cache.shape[2] % block_size:
            return cls(cache.shape[0], block_size, cache.shape[1], cache.shape[2] // block_size - 1)
        if cache.dtype == torch.uint8 or cache.ndim != 4:
            raise ValueError(
                f"a cache in {cache.dtype} with blocks of {block_size} tokens cannot be "
                f"{list(cache.shape)}"
            )
        blocks, size, heads, dim = cache.shape
        return cls(blocks, size, heads, dim - (SCALE_BYTES if cache.dtype == torch.int8 else 0))


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


def encode_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round keys or values to e4m3.

    Args:
        states: ``[..., D]``, floating point.

    Returns:
        The numbers, uint8 ``[..., D]``, and the scale's exponents, uint8 ``[...]``.
    """
    wide = states.float()
    largest = wide.abs().contiguous().view(torch.int32).amax(-1)
    # Adding what 1.75 lacks to 2 carries into the exponent where the mantissa is larger.
    exponent = ((largest + (0x7FFFFF - _MANTISSA_OF_448)) >> 23).sub_(8).clamp_(min=1)
    finite = largest < _INFINITY
    inverse = ((254 - exponent) << 23).view(torch.float32).where(finite, 0.0)
    codes = (wide * inverse.unsqueeze(-1)).where(finite.unsqueeze(-1), 0.0)
    exponent = exponent.where(finite, 255)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), exponent.to(torch.uint8)


def decode_fp8(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`encode_fp8`'s numbers stand for.

    Args:
        codes: uint8 ``[..., D]``.
        exponents: uint8 ``[...]``.
        dtype: of the result.

    Returns:
        ``[..., D]``, contiguous.
    """
    factor = (exponents.int() << 23).view(torch.float32).unsqueeze(-1)
    return (codes.view(torch.float8_e4m3fn).float() * factor).to(dtype).contiguous()


def fp8_parts(cache: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The numbers ``[blocks, Hkv, block_size, D]`` of a cache in ``HEADS_FP8``, and the exponents.

    Both are views; the exponents are ``[blocks, Hkv, block_size]``.
    """
    blocks, size, heads, dim = CacheShape.of(cache, block_size)
    codes = cache[..., : size * dim].view(blocks, heads, size, dim)
    return codes, cache[..., size * dim :]

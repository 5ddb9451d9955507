"""Repacks GGUF's blocks: whole weights in few bits, never dequantised.

Specification: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp. A block holds the codes of
consecutive inputs of one output and what they are scaled with. In K-quants a block of 256 inputs
has groups of 32 (or 16), whose scales are codes themselves, scaled by the block's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..form import QuantizedWeight
from .codes import nibbles

__all__ = ["BLOCKS", "Block", "repack"]

_BLOCK = 256


class Block(NamedTuple):
    """A type of blocks, and what it becomes.

    Attributes:
        size: weights of a block.
        num_bytes: of a block.
        bits: of the form's codes.
        group: inputs of the form's groups.
        scales: numbers of the form for each group: a scale, or a scale and a zero.
        unpack: makes the form.
    """

    size: int
    num_bytes: int
    bits: int
    group: int
    scales: int
    unpack: Callable[[Tensor, int], QuantizedWeight]


def repack(kind: str, data: Tensor, inputs: int) -> QuantizedWeight:
    """The form of a tensor in blocks.

    Args:
        kind: a key of :data:`BLOCKS`.
        data: uint8 ``[outputs, bytes]``.
        inputs: weights of a row.

    Raises:
        ValueError: rows have other sizes than ``kind`` says, or scales are not finite.
    """
    block = BLOCKS[kind]
    outputs = data.shape[0]
    if inputs % block.size or data.shape[1] != inputs // block.size * block.num_bytes:
        raise ValueError(f"{data.shape[1]} bytes are no {kind} of {inputs} weights")
    return block.unpack(data.reshape(-1, block.num_bytes), outputs)


def _q4_0(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """fp16 scale; 16 bytes: codes 0 to 15 in the low four bits, 16 to 31 in the high."""
    data = blocks[:, 2:]
    codes = torch.cat((data & 15, data >> 4), dim=1).view(torch.int8) - 8
    return QuantizedWeight(
        4, codes.view(outputs, -1), _half(blocks, 0).view(outputs, -1), group_size=32
    )


def _q4_1(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """As Q4_0, but codes count from a least: fp16 scale and least; 16 bytes of codes."""
    data = blocks[:, 4:]
    codes = torch.cat((data & 15, data >> 4), dim=1)
    return _with_leasts(4, codes, _half(blocks, 0), -_half(blocks, 2), outputs)


def _q5_0(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """As Q4_0, but 4 bytes before the codes have their fifth bits: bit ``i`` for code ``i``."""
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(torch.int8) - 16
    return QuantizedWeight(
        5, codes.view(outputs, -1), _half(blocks, 0).view(outputs, -1), group_size=32
    )


def _q5_1(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """As Q4_1, with fifth bits as Q5_0 has them."""
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return _with_leasts(5, codes, _half(blocks, 0), -_half(blocks, 2), outputs)


def _q8_0(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """fp16 scale; 32 codes int8."""
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return QuantizedWeight(
        8, codes.view(outputs, -1), _half(blocks, 0).view(outputs, -1), group_size=32
    )


def _q4_k(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """fp16 scale and least; 12 bytes of scales and leasts; 128 bytes of codes."""
    return _with_leasts(4, _by_halves(blocks[:, 16:]), *_scales_and_leasts(blocks), outputs)


def _q5_k(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """As Q4_K, but 32 bytes before the codes have their fifth bits: bit ``g`` for group ``g``."""
    high = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    codes = _by_halves(blocks[:, 48:]) | ((high & 1) << 4).flatten(1)
    return _with_leasts(5, codes, *_scales_and_leasts(blocks), outputs)


def _q6_k(blocks: Tensor, outputs: int) -> QuantizedWeight:
    """128 bytes of low four bits, 64 of high two; 16 scales int8; fp16 scale."""
    low = blocks[:, :128].view(-1, 2, 64)
    low = torch.cat((low & 15, low >> 4), dim=2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | high.flatten(2) << 4).view(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return QuantizedWeight(6, codes.view(outputs, -1), scales.view(outputs, -1), group_size=16)


def _scales_and_leasts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight groups of each block of Q4_K or Q5_K: six bits each, in 12 bytes."""
    first, second, both = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), dim=1)
    leasts = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), dim=1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * leasts.float()


def _with_leasts(
    bits: int, codes: Tensor, scale: Tensor, least: Tensor, outputs: int
) -> QuantizedWeight:
    """``scale * code - least`` in groups of 32; the form has ``scale * (code - zero)``."""
    # A group of equal weights has no scale: it becomes code 0 around zero point 1, times its least.
    flat = scale == 0
    scale = torch.where(flat, torch.where(least == 0, 1.0, least), scale)
    zeros = torch.where(flat, (least != 0).float(), least / scale)
    codes = torch.where(flat.repeat_interleave(32, dim=1), 0, codes)
    return QuantizedWeight(
        bits,
        codes.to(torch.uint8).reshape(outputs, -1),
        scale.view(outputs, -1),
        zeros.view(outputs, -1),
        group_size=32,
    )


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """32 codes of 16 bytes with their low four bits and 4 bytes with their fifth."""
    bits = (high.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1
    return torch.cat((low & 15, low >> 4), dim=1) | (bits << 4).flatten(1)


def _by_halves(data: Tensor) -> Tensor:
    """Codes of 128 bytes: of each 32, the low halves are a group and the high ones the next."""
    return nibbles(data.reshape(-1, 4, 32)).view(-1, 4, 32, 2).transpose(2, 3).reshape(-1, _BLOCK)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The fp16 at byte ``begin`` of each block, float32 ``[blocks, 1]``."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


BLOCKS: Mapping[str, Block] = {
    "Q4_0": Block(32, 18, 4, 32, 1, _q4_0),
    "Q4_1": Block(32, 20, 4, 32, 2, _q4_1),
    "Q5_0": Block(32, 22, 5, 32, 1, _q5_0),
    "Q5_1": Block(32, 24, 5, 32, 2, _q5_1),
    "Q8_0": Block(32, 34, 8, 32, 1, _q8_0),
    "Q4_K": Block(_BLOCK, 144, 4, 32, 2, _q4_k),
    "Q5_K": Block(_BLOCK, 176, 5, 32, 2, _q5_k),
    "Q6_K": Block(_BLOCK, 210, 6, 16, 1, _q6_k),
}
"""Served types."""

"""What formats share: integer codes out of machine words, and one form for what is symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

from ..form import QuantizedWeight

__all__ = ["grouping", "linear_weight", "nibbles", "unpack_words"]


def nibbles(data: Tensor) -> Tensor:
    """uint8 ``[..., n]`` to codes uint8 ``[..., 2 * n]``, the low four bits of a byte first."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 ``[..., n]`` to codes uint8 ``[..., n * 32 // bits]``, a word's lowest bits first.

    Args:
        words: little-endian, as safetensors stores them.
        bits: of a code, 4 or 8.
    """
    data = words.contiguous().view(torch.uint8)
    return nibbles(data) if bits == 4 else data


def linear_weight(
    bits: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    permutation: Tensor | None = None,
) -> QuantizedWeight:
    """The form of unsigned codes around ``zeros``; symmetric ones become signed codes.

    Args:
        bits: of a code.
        codes: uint8 ``[outputs, inputs]``.
        scales: floats ``[outputs, groups]``.
        zeros: floats ``[outputs, groups]`` in units of codes; None: the middle,
            ``2 ** (bits - 1)``.
        group_size: as the form has it.
        permutation: as the form has it.

    Raises:
        ValueError: as the form does.
    """
    middle = 2 ** (bits - 1)
    scales = scales.float().contiguous()
    if zeros is None or bool((zeros == middle).all()):
        # Adding 128 to a byte and reading it as signed takes 128 off; four bits have room to spare.
        signed = codes.view(torch.int8) - middle if bits < 8 else (codes ^ 128).view(torch.int8)
        return QuantizedWeight(bits, signed, scales, group_size=group_size, permutation=permutation)
    zeros = zeros.float().contiguous()
    return QuantizedWeight(
        bits, codes.contiguous(), scales, zeros, group_size, permutation=permutation
    )


def grouping(groups_of_inputs: Tensor, group_size: int) -> Tensor | None:
    """The permutation that sorts inputs by group; None if they are sorted.

    Args:
        groups_of_inputs: integers ``[inputs]``, which group each input belongs to (``g_idx``).
        group_size: of every group but the last.

    Raises:
        ValueError: a group has another size.
    """
    groups = groups_of_inputs.long()
    sorted_groups = torch.arange(len(groups)) // group_size
    if torch.equal(groups, sorted_groups):
        return None
    permutation = groups.argsort(stable=True)
    if not torch.equal(groups[permutation], sorted_groups):
        raise ValueError(f"g_idx does not divide the inputs into groups of {group_size}")
    return permutation

"""A linear layer over weights in four or eight bits, decoded as they are multiplied.

Formula, with group ``g = k // group``::

    weight[n, k] = scales[n, g] * value(codes[n, k]) + offsets[n, g]
    y[m, n] = sum_k x[m, k] * weight[n, k]

The weight is rounded to x's dtype, and sums are in float32. Reference: weight-only quantisation as
in GPTQ (Frantar et al. 2023, https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gpu.availability import HAS_TRITON

__all__ = ["PackedWeight", "pack_codes", "quantized_linear"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight ``[outputs, inputs]`` in codes.

    Attributes:
        bits: 4 or 8.
        codes: uint8 ``[outputs, inputs * bits / 8]``: of two codes in a byte, the lower four bits
            are the first.
        scales: float32 ``[outputs, groups]``.
        group: inputs of a group, a power of two from 16; or all.
        values: float32 ``[2 ** bits]``, what each code stands for.
        offsets: float32 ``[outputs, groups]``; None: zeros.
        inputs: columns of the weight.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    group: int
    values: Tensor
    offsets: Tensor | None
    inputs: int

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[outputs, inputs]``."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, : self.inputs]
        group = torch.arange(self.inputs, device=codes.device) // self.group
        weight = self.values[codes.int()] * self.scales[:, group]
        if self.offsets is not None:
            weight += self.offsets[:, group]
        return weight.to(dtype)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[outputs, inputs]`` as :class:`PackedWeight` has them."""
    if bits == 8:
        return codes.contiguous()
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous()


def quantized_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., inputs]`` of float32, float16 or bfloat16.
        weight: on x's device.
        bias: ``[outputs]`` of x's dtype; None: zeros.

    Returns:
        ``[..., outputs]`` of x's dtype.

    Raises:
        ValueError: x has another number of columns.
    """
    if x.shape[-1] != weight.inputs:
        raise ValueError(f"x has {x.shape[-1]} columns, and the weight {weight.inputs}")
    if x.is_cuda and HAS_TRITON:
        from .gpu.quantized_linear_triton import quantized_linear_triton

        out = quantized_linear_triton(
            x.reshape(-1, weight.inputs),
            weight.codes,
            weight.scales,
            weight.values,
            weight.offsets,
            bits=weight.bits,
            group=weight.group,
        )
        out = out.view(*x.shape[:-1], -1)
        return out if bias is None else out + bias
    return torch.nn.functional.linear(x, weight.dequantized(x.dtype), bias)

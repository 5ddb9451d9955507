"""Rounds weights to few bits, to nearest, without looking at activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .form import QuantizedWeight

__all__ = [
    "FP8_VALUES",
    "NF4_VALUES",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "quantize_nf4",
]

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat4: quantiles of the normal distribution (Dettmers et al., QLoRA, 2023, appendix E)."""

FP8_VALUES = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
"""What each byte stands for as e4m3 (OCP 8-bit floating point, 2023); two of them are no number."""

_LARGEST_FP8 = 448.0


def quantize_int8(weight: Tensor, *, per_tensor: bool = False) -> QuantizedWeight:
    """Symmetric 8-bit codes -127 .. 127: every weight is at most half a scale off.

    Args:
        weight: ``[outputs, inputs]`` of floats.
        per_tensor: one scale for all, instead of one for each output.

    Raises:
        ValueError: a weight is not finite.
    """
    values = _checked(weight)
    largest = values.abs().amax(dim=1, keepdim=True)
    if per_tensor:
        largest = largest.amax().expand_as(largest)
    scales = _scales(largest / 127)
    codes = (values / scales).round_().to(torch.int8)
    return QuantizedWeight(8, codes, scales)


def quantize_int4(
    weight: Tensor, *, group_size: int = 64, symmetric: bool = True
) -> QuantizedWeight:
    """4-bit codes by groups of inputs: every weight is at most half a scale off.

    Args:
        weight: ``[outputs, inputs]`` of floats.
        group_size: inputs that share a scale; 0: all.
        symmetric: codes -8 .. 7 around zero, instead of codes 0 .. 15 between a group's extremes.

    Raises:
        ValueError: a weight is not finite, or ``group_size`` is negative.
    """
    values = _checked(weight)
    groups = _grouped(values, group_size)
    if symmetric:
        # Sixteen codes span 15 steps: the half at either end is still rounded to the last code.
        scales = _scales(groups.abs().amax(dim=2) / 7.5)
        codes = (groups / scales.unsqueeze(2)).round_().clamp_(-8, 7).to(torch.int8)
        return QuantizedWeight(4, _ungrouped(codes, values), scales, group_size=group_size)
    low, high = groups.amin(dim=2).clamp_max(0), groups.amax(dim=2).clamp_min(0)
    scales = _scales((high - low) / 15)
    zeros = (-low / scales).round_()
    steps = (groups / scales.unsqueeze(2)).round_() + zeros.unsqueeze(2)
    codes = steps.clamp_(0, 15).to(torch.uint8)
    return QuantizedWeight(4, _ungrouped(codes, values), scales, zeros, group_size)


def quantize_nf4(weight: Tensor, *, group_size: int = 64) -> QuantizedWeight:
    """4-bit codes for the quantiles of normally distributed weights, by groups of inputs.

    Args:
        weight: ``[outputs, inputs]`` of floats.
        group_size: inputs that share a scale; 0: all.

    Raises:
        ValueError: a weight is not finite, or ``group_size`` is negative.
    """
    values = _checked(weight)
    groups = _grouped(values, group_size)
    codebook = torch.tensor(NF4_VALUES, device=weight.device)
    scales = _scales(groups.abs().amax(dim=2))
    middles = (codebook[1:] + codebook[:-1]) / 2
    codes = torch.bucketize(groups / scales.unsqueeze(2), middles).to(torch.uint8)
    return QuantizedWeight(
        4, _ungrouped(codes, values), scales, group_size=group_size, codebook=codebook
    )


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """e4m3 with a scale for each output: relative errors up to 1/16 down to 2^-6 of a scale.

    Args:
        weight: ``[outputs, inputs]`` of floats.

    Raises:
        ValueError: a weight is not finite.
    """
    values = _checked(weight)
    scales = _scales(values.abs().amax(dim=1, keepdim=True) / _LARGEST_FP8)
    codes = (values / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    codebook = torch.tensor(FP8_VALUES, device=weight.device)
    return QuantizedWeight(8, codes, scales, codebook=codebook)


def _checked(weight: Tensor) -> Tensor:
    values = weight.detach().float()
    if not bool(values.isfinite().all()):
        raise ValueError("weights that are not finite cannot be quantised")
    return values


def _scales(scales: Tensor) -> Tensor:
    """Where all weights are zero, or too small for a scale of their own, they become zeros."""
    return torch.where(scales < torch.finfo(torch.float32).tiny, scales.new_ones(()), scales)


def _grouped(values: Tensor, group_size: int) -> Tensor:
    """``[outputs, groups, group_size]``; zeros fill the last group, which changes no extreme."""
    if group_size < 0:
        raise ValueError(f"a group size of {group_size}; allowed: from 0")
    outputs, inputs = values.shape
    size = group_size or inputs
    padded = torch.nn.functional.pad(values, (0, -inputs % size))
    return padded.view(outputs, -1, size)


def _ungrouped(codes: Tensor, values: Tensor) -> Tensor:
    outputs, inputs = values.shape
    return codes.reshape(outputs, -1)[:, :inputs].contiguous()

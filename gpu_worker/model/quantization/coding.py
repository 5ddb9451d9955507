"""Repacks quantised weights for the native library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.kernels.cpu import CodedWeight, Codes

from .form import QuantizedWeight
from .quantized_modules import QuantizedLinear
from .quantizers import FP8_VALUES

__all__ = ["Linear", "is_permuted", "matrix_parts", "packed_bytes"]

Linear = nn.Linear | QuantizedLinear

_FOUR_BIT_UNIT, _EIGHT_BIT_UNIT = 4, 2


def matrix_parts(
    layers: Sequence[Linear], dtype: torch.dtype
) -> tuple[Tensor, ...] | tuple[CodedWeight, ...]:
    """The weights of ``layers`` as parts of one matrix: all coded alike, or else all in full.

    Args:
        layers: they read the same inputs.
        dtype: in which they compute.
    """
    coded = [_coded(layer) for layer in layers]
    first = coded[0]
    if first is not None and all(c is not None and c.goes_with(first) for c in coded):
        return tuple(c for c in coded if c is not None)
    return tuple(
        layer.weight if isinstance(layer, nn.Linear) else layer.quantized.dequantize(dtype)
        for layer in layers
    )


def is_permuted(layer: Linear) -> bool:
    """Whether its inputs are permuted (``desc_act``), so that it is computed in full."""
    return isinstance(layer, QuantizedLinear) and layer.quantized.permutation is not None


def packed_bytes(layer: Linear, dtype: torch.dtype) -> int:
    """Memory that the weights of ``layer`` take when they are packed to compute in ``dtype``."""
    if isinstance(layer, nn.Linear):
        return layer.weight.nbytes
    if is_permuted(layer):
        return layer.out_features * layer.in_features * dtype.itemsize
    return layer.quantized.num_bytes


def _coded(layer: Linear) -> CodedWeight | None:
    """None: in full, or of a form that the library does not compute with."""
    if isinstance(layer, nn.Linear) or layer.quantized.permutation is not None:
        return None
    return _of_form(layer.quantized)


def _of_form(form: QuantizedWeight) -> CodedWeight | None:
    group = form.group_size or form.inputs
    if form.codebook is not None:
        return _by_codebook(form, form.codebook, group)
    zeros = form.zeros
    if form.bits <= 4:
        least = 0 if zeros is not None else 8
        if group < form.inputs and group % _FOUR_BIT_UNIT:
            return None
        # Values around zero, so that sums of products and of inputs hardly cancel.
        offsets = None if zeros is None else (8 - zeros) * form.scales
        stored = (form.codes + least).to(torch.uint8)
        return CodedWeight(Codes.INT4, stored, form.scales, group, offsets)
    if group < form.inputs and group % _EIGHT_BIT_UNIT:
        return None
    if zeros is None:
        return CodedWeight(Codes.INT8, form.codes, form.scales, group)
    middle = 2 ** (form.bits - 1)
    centred = (form.codes.short() - middle).to(torch.int8)
    return CodedWeight(Codes.INT8, centred, form.scales, group, (middle - zeros) * form.scales)


def _by_codebook(form: QuantizedWeight, codebook: Tensor, group: int) -> CodedWeight | None:
    if form.bits <= 4:
        values = torch.zeros(16)
        values[: len(codebook)] = codebook
        if group < form.inputs and group % _FOUR_BIT_UNIT:
            return None
        return CodedWeight(Codes.TABLE4, form.codes, form.scales, group, values=values)
    table = torch.tensor(FP8_VALUES)
    known = form.bits == 8 and torch.allclose(codebook, table, rtol=0, atol=0, equal_nan=True)
    # The two codes that are no number have no place in a product.
    if not known or bool(((form.codes & 0x7F) == 0x7F).any()):
        return None
    if group < form.inputs and group % _EIGHT_BIT_UNIT:
        return None
    return CodedWeight(Codes.FP8, form.codes, form.scales, group)

"""Repacks quantised weights for the native library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kernels.cpu import CodedWeight, Codes, MappedPart

from .form import QuantizedWeight
from .quantized_modules import QuantizedLinear
from .quantizers import FP8_VALUES

__all__ = [
    "Form",
    "Linear",
    "MappedLinear",
    "common_form",
    "is_coded_otherwise",
    "is_permuted",
    "matrix_parts",
    "packed_bytes",
]


@dataclass(frozen=True, slots=True)
class MappedLinear:
    """A linear layer whose weight lies in a file, as the native library has packed it.

    Attributes:
        out_features: outputs.
        in_features: inputs of each.
        bias: ``[out_features]``; None: zeros.
    """

    out_features: int
    in_features: int
    bias: Tensor | None


Linear = nn.Linear | QuantizedLinear | MappedLinear

_UNITS = {Codes.INT4: 4, Codes.TABLE4: 4, Codes.INT8: 2, Codes.FP8: 2}
"""What a group's inputs are a multiple of, unless one group has all."""

_SCALE = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix's weights are coded.

    Attributes:
        kind: of the codes.
        group: inputs of a group.
        has_offsets: whether a group has an offset beside its scale.
        values: of ``TABLE4``.
    """

    kind: Codes
    group: int
    has_offsets: bool = False
    values: tuple[float, ...] | None = None

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Memory of a weight in this form once it is packed."""
        per_group = _SCALE * (2 if self.has_offsets else 1)
        codes = inputs if self.kind in (Codes.INT8, Codes.FP8) else -(-inputs // 2)
        return outputs * (codes + per_group * -(-inputs // self.group))


def common_form(forms: Sequence[Form | None], inputs: int) -> Form | None:
    """The form that weights of one matrix can all be given without changing a number.

    Codes of four bits fit in eight, and a group can be cut in smaller ones of the same scale.

    Args:
        forms: of the weights; None: in full.
        inputs: of the matrix.

    Returns:
        None if there is none: then all are computed in full.
    """
    found = [form for form in forms if form is not None]
    if len(found) < len(forms):
        return None
    if all(form == found[0] for form in found):
        return found[0]
    kinds = {form.kind for form in found}
    if not kinds <= {Codes.INT4, Codes.INT8}:
        return None
    kind = Codes.INT8 if Codes.INT8 in kinds else Codes.INT4
    group = math.gcd(*(form.group for form in found))
    if group < inputs and group % _UNITS[kind]:
        return None
    return Form(kind, group, any(form.has_offsets for form in found))


def matrix_parts(
    layers: Sequence[Linear], dtype: torch.dtype
) -> tuple[Tensor, ...] | tuple[CodedWeight, ...] | tuple[MappedPart, ...]:
    """The weights of ``layers`` as parts of one matrix: all coded alike, or else all in full.

    Where they lie in a file, all do.

    Args:
        layers: they read the same inputs.
        dtype: in which they compute.
    """
    packed = [layer for layer in layers if isinstance(layer, MappedLinear)]
    if packed:
        return tuple(MappedPart(layer.out_features, layer.in_features) for layer in packed)
    common = common_form([_form(layer) for layer in layers], layers[0].in_features)
    coded = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if common is not None and len(coded) == len(layers):
        return tuple(_given(_coded(layer.quantized), common) for layer in coded)
    return tuple(
        layer.weight if isinstance(layer, nn.Linear) else layer.quantized.dequantize(dtype)
        for layer in layers
        if not isinstance(layer, MappedLinear)
    )


def is_permuted(layer: Linear) -> bool:
    """Whether its inputs are permuted (``desc_act``), so that it is computed in full."""
    return isinstance(layer, QuantizedLinear) and layer.quantized.permutation is not None


def is_coded_otherwise(layer: Linear) -> bool:
    """Whether it is quantised in a form without codes of the library, such as odd groups."""
    return isinstance(layer, QuantizedLinear) and _form(layer, look=False) is None


def packed_bytes(layers: Sequence[Linear], dtype: torch.dtype) -> int:
    """Memory that the weights of one matrix take when they are packed to compute in ``dtype``.

    None where they lie in a file.
    """
    common = common_form([_form(layer, look=False) for layer in layers], layers[0].in_features)
    if common is not None:
        return sum(common.num_bytes(layer.out_features, layer.in_features) for layer in layers)
    return sum(
        layer.weight.nbytes
        if isinstance(layer, nn.Linear)
        else layer.out_features * layer.in_features * dtype.itemsize
        for layer in layers
        if not isinstance(layer, MappedLinear)
    )


def _form(layer: Linear, *, look: bool = True) -> Form | None:
    """None: in full, or of a form that the library does not compute with.

    Args:
        layer: any.
        look: for codes that are no number, through all of them.
    """
    if not isinstance(layer, QuantizedLinear) or layer.quantized.permutation is not None:
        return None
    weight = layer.quantized
    group, four = weight.group_size or weight.inputs, weight.bits <= 4
    values = None
    if weight.codebook is not None:
        kind = Codes.TABLE4 if four else Codes.FP8
        if not four and not _is_fp8(weight, weight.codebook, look=look):
            return None
        values = tuple(weight.codebook.tolist()) if four else None
    else:
        kind = Codes.INT4 if four else Codes.INT8
    if group < weight.inputs and group % _UNITS[kind]:
        return None
    return Form(kind, group, weight.zeros is not None, values)


def _is_fp8(weight: QuantizedWeight, codebook: Tensor, *, look: bool) -> bool:
    """The two codes that are no number have no place in a product."""
    table = torch.tensor(FP8_VALUES)
    known = weight.bits == 8 and torch.allclose(codebook, table, rtol=0, atol=0, equal_nan=True)
    return known and not (look and bool(((weight.codes & 0x7F) == 0x7F).any()))


def _coded(weight: QuantizedWeight) -> CodedWeight:
    """``weight``, which has a form."""
    group, zeros = weight.group_size or weight.inputs, weight.zeros
    if weight.codebook is not None:
        if weight.bits > 4:
            return CodedWeight(Codes.FP8, weight.codes, weight.scales, group)
        values = torch.zeros(16)
        values[: len(weight.codebook)] = weight.codebook
        return CodedWeight(Codes.TABLE4, weight.codes, weight.scales, group, values=values)
    if weight.bits <= 4:
        least = 0 if zeros is not None else 8
        # Values around zero, so that sums of products and of inputs hardly cancel.
        offsets = None if zeros is None else (8 - zeros) * weight.scales
        stored = (weight.codes + least).to(torch.uint8)
        return CodedWeight(Codes.INT4, stored, weight.scales, group, offsets)
    if zeros is None:
        return CodedWeight(Codes.INT8, weight.codes, weight.scales, group)
    middle = 2 ** (weight.bits - 1)
    centred = (weight.codes.short() - middle).to(torch.int8)
    offsets = (middle - zeros) * weight.scales
    return CodedWeight(Codes.INT8, centred, weight.scales, group, offsets)


def _given(weight: CodedWeight, form: Form) -> CodedWeight:
    """The same numbers in another form."""
    codes = weight.codes
    if weight.kind is Codes.INT4 and form.kind is Codes.INT8:
        codes = codes.to(torch.int8) - 8
    groups, times = -(-weight.shape[1] // form.group), weight.group // form.group

    def cut(values: Tensor) -> Tensor:
        return values if times == 1 else values.repeat_interleave(times, dim=1)[:, :groups]

    scales = cut(weight.scales)
    offsets = None if weight.offsets is None else cut(weight.offsets)
    if form.has_offsets and offsets is None:
        offsets = torch.zeros_like(scales)
    return CodedWeight(form.kind, codes, scales, form.group, offsets, weight.values)

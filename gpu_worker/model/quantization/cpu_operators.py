"""Products with int8 and int4 weights by PyTorch's own CPU operators, where no library is built.

They read codes as they are, and win over dequantised weights where few rows share one reading of
them. They take their scales in the inputs' dtype, so these are rounded to bfloat16. In float32 they
are not vectorised and lose at any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .form import QuantizedWeight

__all__ = ["MOST_ROWS", "OperatorWeight", "operator_weight"]

MOST_ROWS = 16
"""With more rows, a layer's weights are dequantised sooner than the operators are done."""

_OPERATORS = torch.ops.aten  # whose names for quantised weights begin with an underscore
_VECTORISED = ("AVX2", "AVX512")
_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True, eq=False)
class OperatorWeight:
    """A weight ``[outputs, inputs]`` as an operator takes it.

    Attributes:
        codes: int8 ``[outputs, inputs]``, or four bits packed by PyTorch.
        scales: bfloat16 ``[outputs]``; of four bits ``[groups, outputs, 2]``, with offsets.
        group: inputs of a group of four bits; 0: eight bits.
    """

    codes: Tensor
    scales: Tensor
    group: int

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ weight.T``; bfloat16 ``[rows, inputs]`` to ``[rows, outputs]``."""
        if self.group:
            product: Tensor = _OPERATORS._weight_int4pack_mm_for_cpu(  # noqa: SLF001
                x, self.codes, self.group, self.scales
            )
        else:
            product = _OPERATORS._weight_int8pack_mm(x, self.codes, self.scales)  # noqa: SLF001
        return product


def operator_weight(form: QuantizedWeight) -> OperatorWeight | None:
    """``form`` for an operator; None: there is none for it, or it is not vectorised here."""
    plain = form.permutation is None and form.codebook is None
    aligned = form.outputs % 16 == 0 and form.inputs % 32 == 0
    vectorised = torch.backends.cpu.get_cpu_capability() in _VECTORISED
    if not (plain and aligned and vectorised and form.codes.device.type == "cpu"):
        return None
    if form.bits == 8 and form.zeros is None and form.groups == 1:
        scales = form.scales[:, 0].to(torch.bfloat16)
        return OperatorWeight(form.codes.contiguous(), scales.contiguous(), 0)
    if form.bits != 4 or form.group_size not in _GROUPS or form.inputs % form.group_size:
        return None
    # The operator's weight is scale * (code - 8) + offset.
    codes = form.codes.int() + (8 if form.zeros is None else 0)
    if form.zeros is None:
        offsets = torch.zeros_like(form.scales)
    else:
        offsets = (8 - form.zeros) * form.scales
    both = torch.stack((form.scales.T, offsets.T), dim=2).to(torch.bfloat16).contiguous()
    packed = _OPERATORS._convert_weight_to_int4pack_for_cpu(codes, 1)  # noqa: SLF001
    return OperatorWeight(packed, both, form.group_size)

"""mxfp4 checkpoints, as gpt-oss has its experts.

Specification: OCP Microscaling Formats (MX) v1.0, 2023: blocks of 32 values in e2m1 share a scale
in e8m0, ``2 ** (byte - 127)``. For the matrices ``P`` of all experts:

- ``P_blocks`` uint8 ``[experts, outputs, inputs / 32, 16]``: the low four bits first,
- ``P_scales`` uint8 ``[experts, outputs, inputs / 32]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..form import QuantizedWeight
from .codes import nibbles
from .stored_tensors import StoredTensors

__all__ = ["E2M1_VALUES", "MXFP4"]

E2M1_VALUES = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0
)  # fmt: skip
"""What four bits stand for as e2m1."""

_BLOCK = 32


class MXFP4:
    """Reads mxfp4; see the module for what lies where.

    Args:
        config: ``quantization_config`` of the checkpoint.
    """

    label = "mxfp4"
    bits = 4

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config

    def modules(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of each stack of matrices."""
        stacks = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
        return {stack: (f"{stack}_blocks", f"{stack}_scales") for stack in sorted(stacks)}

    def unpack_stack(
        self, tensors: StoredTensors, stack: str, shape: tuple[int, int, int]
    ) -> tuple[QuantizedWeight, ...]:
        """The weights of ``stack``, of ``shape`` ``(experts, outputs, inputs)``.

        Raises:
            ModelError: as :meth:`.WeightFormat.unpack`.
            ValueError: as :meth:`.WeightFormat.unpack`.
        """
        experts, outputs, inputs = shape
        groups, uint8 = -(-inputs // _BLOCK), (torch.uint8,)
        blocks = tensors.read(f"{stack}_blocks", (experts, outputs, groups, 16), uint8)
        exponents = tensors.read(f"{stack}_scales", (experts, outputs, groups), uint8)
        values = torch.tensor(E2M1_VALUES)
        return tuple(
            QuantizedWeight(
                4,
                nibbles(blocks[expert]).view(outputs, groups * _BLOCK)[:, :inputs].contiguous(),
                torch.exp2(exponents[expert].float() - 127),
                group_size=_BLOCK,
                codebook=values,
            )
            for expert in range(experts)
        )

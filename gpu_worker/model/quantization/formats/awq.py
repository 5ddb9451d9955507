"""AWQ checkpoints, as AutoAWQ writes them in its ``gemm`` layout.

Specification: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", 2023; layout: ``WQLinear_GEMM`` of AutoAWQ. For a linear layer ``X``:

- ``X.qweight`` int32 ``[inputs, outputs / 8]``: codes of eight outputs in a word, in the order
  0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits,
- ``X.qzeros`` int32 ``[groups, outputs / 8]``: zero points in the same order,
- ``X.scales`` ``[groups, outputs]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..form import QuantizedWeight
from .codes import linear_weight, unpack_words
from .stored_tensors import StoredTensors
from .weight_format import choose, tensors_by_module, whole_number

__all__ = ["AWQ"]

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word each of eight outputs lies."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class AWQ:
    """Reads AWQ; see the module for what lies where.

    Args:
        config: ``quantization_config`` of the checkpoint.

    Raises:
        UnsupportedModel: bits or a layout that is not served.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        choose("AWQ", "bits", config.get("bits", config.get("w_bit")), (4,))
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        choose("AWQ", "version", layout, ("gemm", "exllama"))
        size = config.get("group_size", config.get("q_group_size"))
        self.group_size = whole_number("AWQ", "group_size", size, -1)
        self.bits = 4
        self.label = f"AWQ, 4 bits in groups of {self.group_size}"

    def modules(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of each quantised layer."""
        return tensors_by_module(names, "qweight", ("qweight", "qzeros", "scales"))

    def unpack(
        self, tensors: StoredTensors, module: str, shape: tuple[int, int]
    ) -> QuantizedWeight:
        """The weight of ``module``, of ``shape`` ``(outputs, inputs)``."""
        outputs, inputs = shape
        size = self.group_size if self.group_size > 0 else inputs
        groups, columns = -(-inputs // size), -(-outputs // 8)
        int32 = (torch.int32,)
        codes = _unpack(tensors.read(f"{module}.qweight", (inputs, columns), int32))
        zeros = _unpack(tensors.read(f"{module}.qzeros", (groups, columns), int32))
        scales = tensors.read(f"{module}.scales", (groups, outputs), _FLOATS)
        return linear_weight(4, codes.T.contiguous(), scales.T, zeros.T, size if groups > 1 else 0)


def _unpack(words: Tensor) -> Tensor:
    rows = words.shape[0]
    return unpack_words(words, 4).view(rows, -1, 8)[:, :, _PLACES].reshape(rows, -1)

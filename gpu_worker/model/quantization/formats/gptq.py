"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Specification: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022; layout: ``qlinear`` of AutoGPTQ and of GPTQModel. For a linear layer ``X``:

- ``X.qweight`` int32 ``[inputs * bits / 32, outputs]``: codes of consecutive inputs in a word,
- ``X.qzeros`` int32 ``[groups, outputs * bits / 32]``: zero points of consecutive outputs in a
  word; as they are in format v2 (``gptq_v2``), and in v1 (``gptq``) with one taken off each, as
  GPTQModel does it: off the word, so that a zero point of 0 borrows from the next. Other readers
  take the 15 it leaves for 16, or miss the borrow. AutoGPTQ lost the zero points behind a 0,
- ``X.scales`` ``[groups, outputs]``,
- ``X.g_idx`` int32 ``[inputs]``: the group of each input, in any order with ``desc_act``; optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.shared.errors import UnsupportedModel

from ..form import QuantizedWeight
from .codes import grouping, linear_weight, unpack_words
from .stored_tensors import StoredTensors
from .weight_format import choose, tensors_by_module, whole_number

__all__ = ["GPTQ"]

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of ones, by the bits of a code."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class GPTQ:
    """Reads GPTQ; see the module for what lies where.

    Args:
        config: ``quantization_config`` of the checkpoint.

    Raises:
        UnsupportedModel: bits or a format that is not served.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = choose("GPTQ", "bits", config.get("bits"), (4, 8))
        written = config.get("checkpoint_format") or config.get("format") or "gptq"
        layout = choose("GPTQ", "checkpoint_format", written, ("gptq", "gptq_v2"))
        self.group_size = whole_number("GPTQ", "group_size", config.get("group_size"), -1)
        overrides = [name for name in config.get("dynamic") or {} if not name.startswith("-")]
        if overrides:
            raise UnsupportedModel(
                f"this GPTQ checkpoint has bits of their own for {overrides[0]!r}; served: the "
                "same for all layers, quantise it again without 'dynamic'"
            )
        self._ones = _ONES[self.bits] if layout == "gptq" else 0
        self.label = f"GPTQ, {self.bits} bits" + (
            f" in groups of {self.group_size}" if self.group_size > 0 else ""
        )

    def modules(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of each quantised layer."""
        return tensors_by_module(names, "qweight", _PARTS)

    def unpack(
        self, tensors: StoredTensors, module: str, shape: tuple[int, int]
    ) -> QuantizedWeight:
        """The weight of ``module``, of ``shape`` ``(outputs, inputs)``."""
        outputs, inputs = shape
        size = self.group_size if self.group_size > 0 else inputs
        groups, packed = -(-inputs // size), 32 // self.bits
        int32 = (torch.int32,)
        words = tensors.read(f"{module}.qweight", (-(-inputs // packed), outputs), int32)
        codes = unpack_words(words.T, self.bits)[:, :inputs]
        zero_words = tensors.read(f"{module}.qzeros", (groups, -(-outputs // packed)), int32)
        zeros = unpack_words(zero_words + self._ones, self.bits)[:, :outputs].T.float()
        scales = tensors.read(f"{module}.scales", (groups, outputs), _FLOATS).T
        permutation = None
        if f"{module}.g_idx" in tensors.names:
            permutation = grouping(tensors.read(f"{module}.g_idx", (inputs,), int32), size)
        if permutation is not None:
            codes = codes[:, permutation]
        return linear_weight(
            self.bits, codes.contiguous(), scales, zeros, size if groups > 1 else 0, permutation
        )

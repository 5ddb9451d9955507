"""bitsandbytes checkpoints: nf4 and fp4, with absolute maxima that may be quantised again; int8.

Specification: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, and
"LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022; layout: ``QuantState``
and ``Int8Params`` of bitsandbytes. For a linear layer ``X`` in four bits:

- ``X.weight`` uint8 ``[outputs * inputs / 2, 1]``: codes row by row, the high four bits first,
- ``X.weight.quant_map`` ``[16]``: what each code stands for,
- ``X.weight.absmax``: a scale for each block of consecutive weights; with double quantisation uint8
  codes of ``X.weight.nested_quant_map`` ``[256]``, scaled by ``X.weight.nested_absmax`` for each
  block of scales, plus an offset,
- ``X.weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``): JSON in bytes with sizes and offset;

and in eight bits ``X.weight`` int8 ``[outputs, inputs]`` and ``X.SCB`` ``[outputs]``, the largest
weight of each output, which stands for 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..form import QuantizedWeight
from .stored_tensors import StoredTensors
from .weight_format import choose, tensors_by_module

__all__ = ["BitsAndBytes"]

_STATE = "weight.quant_state.bitsandbytes__"
_PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
          "weight.nested_quant_map")  # fmt: skip
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class BitsAndBytes:
    """Reads bitsandbytes; see the module for what lies where.

    Args:
        config: ``quantization_config`` of the checkpoint.

    Raises:
        UnsupportedModel: it is in neither four nor eight bits.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = 8 if config.get("load_in_8bit") else 4 if config.get("load_in_4bit") else 0
        choose("bitsandbytes", "bits", self.bits, (4, 8))
        self._kind = ""
        if self.bits == 4:
            found = str(config.get("bnb_4bit_quant_type", "fp4"))
            self._kind = choose("bitsandbytes", "bnb_4bit_quant_type", found, ("nf4", "fp4"))
        self.label = f"bitsandbytes, {self._kind or 'int8'}"

    def modules(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of each quantised layer."""
        if self.bits == 8:
            return tensors_by_module(names, "SCB", ("weight", "SCB", "weight_format"))
        marker = _STATE + self._kind
        return tensors_by_module(names, marker, (*_PARTS, marker))

    def unpack(
        self, tensors: StoredTensors, module: str, shape: tuple[int, int]
    ) -> QuantizedWeight:
        """The weight of ``module``, of ``shape`` ``(outputs, inputs)``."""
        if self.bits == 4:
            return self._four_bits(tensors, module, shape)
        if f"{module}.weight_format" in tensors.names:
            layout = int(tensors.read(f"{module}.weight_format").reshape(-1)[0])
            if layout:  # "row" is 0; others are for certain GPUs
                raise tensors.fault(
                    f"{module}.weight_format", f"layout {layout}; served: 0, row by row"
                )
        codes = tensors.read(f"{module}.weight", shape, (torch.int8,))
        largest = tensors.read(f"{module}.SCB", (shape[0],), _FLOATS).float()
        return QuantizedWeight(8, codes, (largest / 127).unsqueeze(1))

    def _four_bits(
        self, tensors: StoredTensors, module: str, shape: tuple[int, int]
    ) -> QuantizedWeight:
        (outputs, inputs), name = shape, f"{module}.weight"
        state = _state(tensors, f"{module}.{_STATE}{self._kind}")
        block = int(state["blocksize"])
        if list(shape) != list(state["shape"]):
            raise tensors.fault(name, f"its shape is {state['shape']}, expected: {list(shape)}")
        if block < 1 or (outputs * inputs) % 2:
            raise tensors.fault(name, f"blocks of {block} in {list(shape)} weights")
        data = tensors.read(name, None, (torch.uint8,)).reshape(-1)
        if len(data) != outputs * inputs // 2:
            raise tensors.fault(
                name, f"it has {len(data)} bytes, expected: {outputs * inputs // 2}"
            )
        codes = torch.stack((data >> 4, data & 15), dim=-1).view(outputs, inputs)
        count = -(-outputs * inputs // block)
        scales = _absolute_maxima(tensors, name, state, count)
        # Blocks run on over the ends of rows; so a group is what never crosses either border.
        group = math.gcd(block, inputs)
        firsts = torch.arange(outputs * inputs // group) * group // block
        return QuantizedWeight(
            4,
            codes,
            scales[firsts].view(outputs, -1),
            group_size=group,
            codebook=tensors.read(f"{name}.quant_map", (16,), _FLOATS).float(),
        )


def _state(tensors: StoredTensors, name: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(bytes(tensors.read(name, None, (torch.uint8,)).tolist()))
        int(state["blocksize"]), list(state["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise tensors.fault(name, f"no quantisation state ({error!r})") from error
    return state


def _absolute_maxima(
    tensors: StoredTensors, name: str, state: Mapping[str, Any], count: int
) -> Tensor:
    """float32 ``[count]``."""
    nested = f"{name}.nested_absmax"
    if nested not in tensors.names:
        return tensors.read(f"{name}.absmax", (count,), _FLOATS).float()
    codes = tensors.read(f"{name}.absmax", (count,), (torch.uint8,))
    try:
        size, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
        if size < 1:
            raise ValueError(size)
    except (KeyError, TypeError, ValueError) as error:
        raise tensors.fault(
            nested, f"the state has no blocks or offset for it ({error!r})"
        ) from error
    outer = tensors.read(nested, (-(-count // size),), _FLOATS).float()
    values = tensors.read(f"{name}.nested_quant_map", (256,), _FLOATS).float()[codes.int()]
    scaled = values * outer.repeat_interleave(size)[:count]
    return scaled + offset

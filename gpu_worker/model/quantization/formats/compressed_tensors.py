"""compressed-tensors checkpoints, as llm-compressor and ``penstock quantize`` write them.

Specification: the package compressed-tensors (vLLM project), ``compressors``. For a linear layer
``X`` with the scheme that ``config_groups`` gives it:

- ``pack-quantized``: ``X.weight_packed`` int32 ``[outputs, inputs * bits / 32]``, the lowest bits
  of a word first, each code with ``2 ** (bits - 1)`` added; ``X.weight_shape``; zero points are
  packed along the outputs, ``X.weight_zero_point`` int32 ``[outputs * bits / 32, groups]``,
- ``int-quantized``: ``X.weight`` int8 ``[outputs, inputs]``, ``X.weight_zero_point`` int8,
- ``float-quantized``: ``X.weight`` e4m3 ``[outputs, inputs]``,
- ``X.weight_scale``: one, ``[outputs, 1]``, ``[outputs, groups]`` or one for each block,
- ``X.weight_g_idx`` int ``[inputs]``: the group of each input; optional.

Activations that a scheme rounds to eight bits are computed unrounded here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.shared.errors import ModelError, UnsupportedModel

from ..form import QuantizedWeight
from ..quantizers import FP8_VALUES
from .codes import grouping, linear_weight, unpack_words
from .stored_tensors import StoredTensors
from .weight_format import CONVERT, choose, tensors_by_module, whole_number

__all__ = ["CompressedTensors"]

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
          "weight_g_idx", "input_scale", "input_zero_point", "output_scale")  # fmt: skip
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CLASSES = ("Embedding", "Linear")
_LABEL = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class _Scheme:
    packed: bool
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]


class CompressedTensors:
    """Reads compressed-tensors; see the module for what lies where.

    Args:
        config: ``quantization_config`` of the checkpoint.

    Raises:
        UnsupportedModel: a format, bits or a strategy that is not served.
        ModelError: a field has a value that it cannot have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping):
            raise ModelError(
                f"quantization_config in config.json has sparsity_config {sparsity!r}, which is no "
                "object; copy the checkpoint again"
            )
        choose(_LABEL, "sparsity format", sparsity.get("format", "dense"), ("dense",))
        choose(_LABEL, "quantization_status", config.get("quantization_status"), ("compressed",))
        for location in _transform_locations(config):
            choose(_LABEL, "transform location", location, ("weight_input", "weight_output"))
        found = {
            str(target): _scheme(group, str(group.get("format") or config.get("format")))
            for group in config["config_groups"].values()
            for target in group["targets"]
        }
        self._schemes = dict(sorted(found.items(), key=lambda item: _rank(item[0])))
        schemes = self._schemes.values()
        self.bits = min((s.bits for s in schemes if s.packed), default=8)
        kinds = sorted({f"{'fp' if s.is_float else 'int'}{s.bits}" for s in schemes})
        self.label = f"{_LABEL}, {' and '.join(kinds)}"

    def modules(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of each quantised layer."""
        return tensors_by_module(names, "weight_scale", _PARTS)

    def unpack(
        self, tensors: StoredTensors, module: str, shape: tuple[int, int]
    ) -> QuantizedWeight:
        """The weight of ``module``, of ``shape`` ``(outputs, inputs)``."""
        found = (s for target, s in self._schemes.items() if _concerns(target, module))
        scheme = next(found, None)
        if scheme is None:
            raise tensors.fault(f"{module}.weight_scale", "no config group targets its layer")
        outputs, inputs = shape
        size = scheme.group_size if scheme.strategy == "group" else 0
        scales = _scales(tensors, module, shape, scheme)
        if scheme.is_float:
            weight = tensors.read(f"{module}.weight", shape, (torch.float8_e4m3fn,))
            if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
                raise tensors.fault(f"{module}.weight", "codes that are no number")
            return QuantizedWeight(
                8,
                weight.view(torch.uint8),
                scales,
                group_size=scheme.block[1] if scheme.strategy == "block" else size,
                codebook=torch.tensor(FP8_VALUES),
            )
        codes = _codes(tensors, module, shape, scheme)
        zeros = None if scheme.symmetric else _zeros(tensors, module, outputs, scales, scheme)
        permutation = None
        if f"{module}.weight_g_idx" in tensors.names and size:
            permutation = grouping(tensors.read(f"{module}.weight_g_idx", (inputs,)), size)
        if permutation is not None:
            codes = codes[:, permutation].contiguous()
        return linear_weight(scheme.bits, codes, scales, zeros, size, permutation)


def _rank(target: str) -> tuple[int, str]:
    """Where the library looks for it: among names, then among patterns, then among classes."""
    if not target.startswith("re:"):
        return 2 if target in _CLASSES else 0, target
    try:
        re.compile(target[3:])
    except re.error as error:
        raise ModelError(
            f"quantization_config in config.json has the target {target!r}, which is no pattern "
            f"({error}); copy the checkpoint again"
        ) from error
    return 1, target


def _concerns(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    if target not in _CLASSES:
        return target == module
    last = module.rpartition(".")[2]
    is_embedding = "embed" in last or last == "wte"  # as all families call it
    return is_embedding == (target == "Embedding")


def _transform_locations(config: Mapping[str, Any]) -> list[str]:
    """Where inputs or weights are multiplied with Hadamard matrices; in weights that is done."""
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    return [str(each["location"]) for group in groups.values() for each in group["apply"]]


def _scheme(group: Mapping[str, Any], layout: str) -> _Scheme:
    layout = choose(_LABEL, "format", layout, _FORMATS)
    weights = group["weights"]
    kind = choose(_LABEL, "type of weights", str(weights["type"]), ("int", "float"))
    bits = choose(_LABEL, "num_bits", weights["num_bits"], (8,) if kind == "float" else (4, 8))
    strategy = choose(
        _LABEL, "strategy", str(weights["strategy"]), ("tensor", "channel", "group", "block")
    )
    block = tuple(weights.get("block_structure") or (1, 1))
    if strategy == "block" and kind == "int":
        raise UnsupportedModel(
            f"this {_LABEL} checkpoint has int weights by blocks; served: by tensor, channel or "
            f"group; {CONVERT}"
        )
    size = whole_number(_LABEL, "group_size", weights.get("group_size"), 0)
    if strategy == "group" and size < 1:
        raise ModelError(
            f"quantization_config in config.json has strategy 'group' with group_size {size}; "
            "allowed: from 1; copy the checkpoint again"
        )
    return _Scheme(
        packed=layout == "pack-quantized",
        bits=bits,
        is_float=kind == "float",
        symmetric=bool(weights.get("symmetric", True)),
        strategy=strategy,
        group_size=size,
        block=(int(block[0]), int(block[1])),
    )


def _scales(tensors: StoredTensors, module: str, shape: tuple[int, int], scheme: _Scheme) -> Tensor:
    outputs, inputs = shape
    scales = tensors.read(f"{module}.weight_scale", None, _FLOATS).float()
    if scheme.strategy == "tensor":
        if scales.numel() != 1:
            raise tensors.fault(f"{module}.weight_scale", f"{scales.numel()} scales, expected: 1")
        return scales.reshape(1, 1).expand(outputs, 1).contiguous()
    rows = outputs
    columns = -(-inputs // scheme.group_size) if scheme.strategy == "group" else 1
    if scheme.strategy == "block":
        rows, columns = -(-outputs // scheme.block[0]), -(-inputs // scheme.block[1])
    if tuple(scales.shape) not in ((rows, columns), (rows,) if columns == 1 else (rows, columns)):
        raise tensors.fault(
            f"{module}.weight_scale",
            f"its shape is {list(scales.shape)}, expected: {[rows, columns]}",
        )
    scales = scales.reshape(rows, columns)
    if scheme.strategy == "block":
        scales = scales.repeat_interleave(scheme.block[0], dim=0)[:outputs]
    return scales


def _codes(tensors: StoredTensors, module: str, shape: tuple[int, int], scheme: _Scheme) -> Tensor:
    """Unsigned codes."""
    outputs, inputs = shape
    if scheme.packed:
        words = tensors.read(
            f"{module}.weight_packed", (outputs, -(-inputs * scheme.bits // 32)), (torch.int32,)
        )
        return unpack_words(words, scheme.bits)[:, :inputs].contiguous()
    codes = tensors.read(f"{module}.weight", shape, (torch.int8,))
    return (codes.int() + (1 << (scheme.bits - 1))).to(torch.uint8)


def _zeros(
    tensors: StoredTensors, module: str, outputs: int, scales: Tensor, scheme: _Scheme
) -> Tensor:
    """Zero points of the unsigned codes, ``[outputs, groups]``."""
    name, groups = f"{module}.weight_zero_point", scales.shape[1]
    if scheme.packed and scheme.strategy in ("group", "channel"):
        rows = -(-outputs * scheme.bits // 32)
        words = tensors.read(name, (rows, groups), (torch.int32,))
        return unpack_words(words.T, scheme.bits)[:, :outputs].T.float()
    zeros = tensors.read(name).float() + (1 << (scheme.bits - 1))
    expected = 1 if scheme.strategy == "tensor" else outputs * groups
    if zeros.numel() != expected:
        raise tensors.fault(name, f"{zeros.numel()} zero points, expected: {expected}")
    return zeros.reshape(-1, groups).expand(outputs, groups)

"""The weights of a quantised checkpoint under the names of the model's modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.shared.errors import UnsupportedModel

from ..form import QuantizedWeight
from .mxfp4 import MXFP4
from .stored_tensors import FULL, StoredTensors
from .weight_format import CONVERT, WeightFormat

__all__ = ["QuantizedSource", "SafetensorsSource", "SourceBytes", "unexpected"]

_SCALE = torch.float32.itemsize
_SCALES = frozenset(
    {"scales", "qzeros", "weight_scale", "weight_zero_point", "SCB", "weight.absmax"}
)
"""Ends of names of what becomes a float32 number each; ``zeros`` that are all alike are dropped."""


class SourceBytes(NamedTuple):
    """Memory that all weights of a source take.

    Attributes:
        loaded: as they are read: a byte for each code. So they stay where torch computes.
        packed: as the native library and the kernel for GPUs keep them.
    """

    loaded: int
    packed: int

    def __add__(self, other: SourceBytes) -> SourceBytes:  # type: ignore[override]
        return SourceBytes(self.loaded + other.loaded, self.packed + other.packed)

    @classmethod
    def of_codes(cls, count: int, bits: int, scales: int) -> SourceBytes:
        """The memory of ``count`` codes of ``bits`` bits and ``scales`` float32 numbers beside."""
        beside = _SCALE * scales
        return cls(count + beside, count // (2 if bits <= 4 else 1) + beside)


class QuantizedSource(Protocol):
    """What a model is filled from.

    Attributes:
        label: of the format, for people.
    """

    label: str

    @property
    def modules(self) -> frozenset[str]:
        """Linear layers, embeddings and stacks of experts that are quantised, by name."""
        ...

    def plain(self, dtype: torch.dtype | str) -> Mapping[str, Tensor]:
        """All other tensors by name: mapped from the files, or in ``dtype`` if they are made anew.

        Raises:
            ModelError: a tensor holds codes, and their scale is missing.
        """
        ...

    def num_bytes(self, dtype: torch.dtype) -> SourceBytes:
        """Memory of all weights, without reading them; unquantised ones are in ``dtype``."""
        ...

    def weight(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        """The weight of ``module``, of ``shape`` ``(outputs, inputs)``.

        Raises:
            ModelError: it is damaged, or of another shape; names the file and the tensor.
        """
        ...

    def stack(self, module: str, shape: tuple[int, int, int]) -> tuple[QuantizedWeight, ...]:
        """The weights of all experts, of ``shape`` ``(experts, outputs, inputs)``.

        Raises:
            ModelError: as :meth:`weight`.
            UnsupportedModel: the format has no stacks.
        """
        ...


class SafetensorsSource:
    """A format's tensors in safetensors files.

    Args:
        tensors: of the checkpoint.
        kind: of its format.
    """

    def __init__(self, tensors: StoredTensors, kind: WeightFormat | MXFP4) -> None:
        self.label = kind.label
        self._tensors, self._kind = tensors, kind
        self._parts = kind.modules(tensors.names)

    @property
    def modules(self) -> frozenset[str]:
        """See :class:`QuantizedSource`."""
        return frozenset(self._parts)

    def plain(self, dtype: torch.dtype | str) -> dict[str, Tensor]:
        """See :class:`QuantizedSource`."""
        del dtype
        taken = {name for parts in self._parts.values() for name in parts}
        rest = self._tensors.names - taken
        for name in rest:
            # transformers would take the codes for numbers.
            if name.endswith(".weight") and self._tensors.stored(name) not in FULL:
                raise self._tensors.fault(
                    name, f"it holds codes ({self._tensors.stored(name)}) without a scale"
                )
        return {name: self._tensors.read(name) for name in rest}

    def num_bytes(self, dtype: torch.dtype) -> SourceBytes:
        """See :class:`QuantizedSource`."""
        total = SourceBytes(0, 0)
        coded = {name: module for module, parts in self._parts.items() for name in parts}
        for name in self._tensors.names:
            stored, count = self._tensors.stored(name), math.prod(self._tensors.shape(name))
            if name in coded:
                end = name.removeprefix(coded[name]).lstrip("._")
                total += self._part_bytes(end, stored, count)
            else:
                each = dtype.itemsize if stored in FULL else 8 if stored.endswith("64") else 1
                total += SourceBytes(count * each, count * each)
        return total

    def _part_bytes(self, end: str, stored: str, count: int) -> SourceBytes:
        """Of a tensor of a quantised module, whose name ends so."""
        bits = self._kind.bits
        numbers = count * 32 // bits if stored == "I32" else count
        if end in ("qweight", "weight_packed"):
            return SourceBytes.of_codes(numbers, bits, 0)
        if end in ("weight", "blocks"):
            twice = stored == "U8" and bits == 4  # two codes a byte
            return SourceBytes.of_codes(2 * count if twice else count, 4 if twice else 8, 0)
        if end in _SCALES:
            return SourceBytes.of_codes(0, bits, numbers)
        return SourceBytes(0, 0)

    def weight(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        """See :class:`QuantizedSource`."""
        if isinstance(self._kind, MXFP4):
            raise unexpected(module)
        try:
            return self._kind.unpack(self._tensors, module, shape)
        except ValueError as error:
            raise self._tensors.fault(self._parts[module][0], str(error)) from error

    def stack(self, module: str, shape: tuple[int, int, int]) -> tuple[QuantizedWeight, ...]:
        """See :class:`QuantizedSource`."""
        if not isinstance(self._kind, MXFP4):
            raise unexpected(module)
        try:
            return self._kind.unpack_stack(self._tensors, module, shape)
        except ValueError as error:
            raise self._tensors.fault(self._parts[module][0], str(error)) from error


def unexpected(module: str) -> UnsupportedModel:
    """The refusal of a quantised tensor that no module of the model can take."""
    return UnsupportedModel(
        f"the checkpoint quantises {module!r}, where the model has no linear layer of its own; "
        f"served: linear layers in all formats, experts in mxfp4; {CONVERT}"
    )

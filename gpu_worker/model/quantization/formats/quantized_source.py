"""The weights of a quantised checkpoint under the names of the model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from penstock.shared.errors import UnsupportedModel

from ..form import QuantizedWeight
from .mxfp4 import MXFP4
from .stored_tensors import StoredTensors
from .weight_format import CONVERT, WeightFormat

__all__ = ["QuantizedSource", "SafetensorsSource", "unexpected"]


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

    def plain(self) -> Mapping[str, Tensor]:
        """All other tensors by name, mapped from the files."""
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

    def plain(self) -> dict[str, Tensor]:
        """See :class:`QuantizedSource`."""
        taken = {name for parts in self._parts.values() for name in parts}
        return {name: self._tensors.read(name) for name in self._tensors.names - taken}

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

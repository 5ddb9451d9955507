"""What a format of quantised checkpoints gives, and which one a checkpoint has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from penstock.shared.errors import ModelError, UnsupportedModel

from ..form import QuantizedWeight
from .stored_tensors import StoredTensors

__all__ = ["CONVERT", "WeightFormat", "choose", "tensors_by_module", "whole_number"]

CONVERT = (
    "quantise the unquantised checkpoint with `penstock quantize SRC DST`, or serve that with "
    "model.quantization"
)

Value = TypeVar("Value", int, str)


class WeightFormat(Protocol):
    """A format, told by the checkpoint's ``quantization_config``.

    Attributes:
        label: what it is, for people.
        bits: of its codes; of those in words, if there are others beside them.
    """

    label: str
    bits: int

    def modules(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """The quantised modules, and which of the checkpoint's tensors belong to each."""
        ...

    def unpack(
        self, tensors: StoredTensors, module: str, shape: tuple[int, int]
    ) -> QuantizedWeight:
        """The weight of ``module``.

        Args:
            tensors: of the checkpoint.
            module: one of :meth:`modules`.
            shape: ``(outputs, inputs)`` that the model wants.

        Raises:
            ModelError: a tensor is missing, or of another shape or type than the format says.
            ValueError: its values cannot be.
        """
        ...


def choose(label: str, field: str, value: object, served: Sequence[Value]) -> Value:
    """``value`` if it is served.

    Args:
        label: of the format.
        field: of its configuration.
        value: what that says.
        served: what can be.

    Raises:
        UnsupportedModel: it is not among them; says what is and how to convert.
    """
    for candidate in served:
        if type(value) is type(candidate) and value == candidate:
            return candidate
    allowed = ", ".join(map(str, served))
    raise UnsupportedModel(
        f"this {label} checkpoint has {field} {value!r}; served: {allowed}; {CONVERT}"
    )


def whole_number(label: str, field: str, value: object, default: int) -> int:
    """``value`` if it is a whole number; ``default`` for None, and for 0, which means the same.

    Raises:
        ModelError: it is neither; names the field.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value or default
    raise ModelError(
        f"quantization_config in config.json has {field} {value!r}, and {label} a whole number "
        "there; copy the checkpoint again"
    )


def tensors_by_module(
    names: Iterable[str], marker: str, parts: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The tensors ``X.part`` of every ``X`` that has ``X.marker``."""
    known = set(names)
    modules = [name.removesuffix(f".{marker}") for name in known if name.endswith(f".{marker}")]
    return {
        module: tuple(f"{module}.{part}" for part in parts if f"{module}.{part}" in known)
        for module in sorted(modules)
    }

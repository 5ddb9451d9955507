"""A decoder's description as JSON: big weights by their names in the checkpoint, others beside it.

A description cannot be recorded if the checkpoint has no name for one of its big tensors, such as a
fused or converted weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from penstock.kernels.cpu import Activation, NormWeights, Rotary

from ..loading.geometry import LayerGeometry
from ..quantization.coding import Linear, MappedLinear
from ..quantization.form import QuantizedWeight
from ..quantization.quantized_modules import QuantizedLinear
from .description import Attention, Decoder, Layer
from .feed_forward import MLP, Experts
from .modules import linear_of

__all__ = ["DecoderRecord", "record_decoder"]

_KINDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (Decoder, Layer, Attention, MLP, LayerGeometry, NormWeights, Rotary)
}

_MOST_ELEMENTS = 1 << 24
"""Of a tensor that is kept beside the description."""


@dataclass(frozen=True, slots=True)
class DecoderRecord:
    """A description without its big weights.

    Attributes:
        tree: JSON; a tensor is ``{"weight": name}`` or ``{"kept": name}``, the weight of a layer
            that came quantised ``{"stored": module, "shape": [outputs, inputs]}``.
        kept: the tensors with names of the second kind.
    """

    tree: Any
    kept: Mapping[str, Tensor]

    def weight_names(self) -> frozenset[str]:
        """Names of the checkpoint's tensors that it needs."""
        return frozenset(_names(self.tree))

    def stored_modules(self) -> frozenset[str]:
        """Names of the layers whose weights the checkpoint must have in codes."""
        return frozenset(_names(self.tree, "stored"))

    def decoder(
        self,
        weight: Callable[[str], Tensor],
        quantize: Callable[[Tensor, str], QuantizedWeight],
        stored: Callable[[str, tuple[int, int]], QuantizedWeight],
    ) -> Decoder:
        """The description again.

        Args:
            weight: gives the checkpoint's tensor of a name, in the model's dtype.
            quantize: makes of it the weight of a quantised layer, which is that part of a model.
            stored: gives the codes of a module's weight of a shape.

        Raises:
            LookupError, TypeError, ValueError: this is no description, or ``weight`` or ``stored``
                raised it.
        """
        return self._read(_Reader(self.kept, weight, quantize, stored))

    def mapped_decoder(
        self, weight: Callable[[str], Tensor], shape: Callable[[str], tuple[int, int]]
    ) -> Decoder:
        """The description, with linear layers whose weights stay in a file.

        Args:
            weight: gives the checkpoint's tensor of a name, in the model's dtype.
            shape: gives its shape.

        Raises:
            LookupError, TypeError, ValueError: as :meth:`decoder`.
        """
        return self._read(_MappedReader(self.kept, weight, shape))

    def _read(self, reader: _Reader) -> Decoder:
        found = reader.read(self.tree)
        if not isinstance(found, Decoder):
            raise ValueError("no description of a decoder")
        return found


def record_decoder(decoder: Decoder, names: Mapping[int, str]) -> DecoderRecord | None:
    """Describe ``decoder``; None if it cannot be recorded.

    Args:
        decoder: its weights are still there.
        names: of the model's parameters, by the address of their data.
    """
    writer = _Writer(names)
    try:
        return DecoderRecord(writer.write(decoder), writer.kept)
    except ValueError:
        return None


def _names(tree: Any, key: str = "weight") -> Iterator[str]:
    if isinstance(tree, dict):
        if isinstance(tree.get(key), str):
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _names(part, key)


class _Writer:
    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._kept_as: dict[int, str] = {}
        self.kept: dict[str, Tensor] = {}

    def write(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Linear):
            bias = None if value.bias is None else value.bias.detach()
            return {"kind": "Linear", "weight": self.write(value.weight), "bias": self.write(bias)}
        if isinstance(value, QuantizedLinear):
            if value.source is None:
                raise ValueError("a quantised weight of unknown origin")
            name, part = value.source
            bias = self.write(value.bias)
            if part == "stored":
                shape = [value.out_features, value.in_features]
                return {"kind": "StoredLinear", "stored": name, "shape": shape, "bias": bias}
            return {
                "kind": "QuantizedLinear",
                "weight": {"weight": name},
                "part": part,
                "bias": bias,
            }
        if isinstance(value, Experts):
            raise ValueError("weights that are slices of a parameter")
        if isinstance(value, tuple):
            return [self.write(item) for item in value]
        if isinstance(value, IntEnum):
            return {"kind": type(value).__name__, "value": int(value)}
        if is_dataclass(value):
            parts = {field.name: self.write(getattr(value, field.name)) for field in fields(value)}
            return {"kind": type(value).__name__, **parts}
        return value

    def _tensor(self, tensor: Tensor) -> dict[str, str]:
        address = tensor.data_ptr()
        if address in self._names:
            return {"weight": self._names[address]}
        if tensor.numel() > _MOST_ELEMENTS:
            raise ValueError("a big weight that is no parameter of the model")
        if address not in self._kept_as:
            self._kept_as[address] = name = f"t{len(self.kept)}"
            self.kept[name] = tensor.detach().clone().contiguous()
        return {"kept": self._kept_as[address]}


class _Reader:
    def __init__(
        self,
        kept: Mapping[str, Tensor],
        weight: Callable[[str], Tensor],
        quantize: Callable[[Tensor, str], QuantizedWeight],
        stored: Callable[[str, tuple[int, int]], QuantizedWeight],
    ) -> None:
        self._kept, self._weight, self._quantize, self._stored = kept, weight, quantize, stored
        self._read: dict[str, Tensor] = {}

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self.read(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "kept" in value:
            return self._kept[value["kept"]]
        kind = value.get("kind")
        if kind is None:
            name = value["weight"]
            if name not in self._read:  # one tensor for an embedding and the head tied to it
                self._read[name] = self._weight(name)
            return self._read[name]
        if kind == "Activation":
            return Activation(value["value"])
        if kind.endswith("Linear"):
            return self._linear(kind, value)
        parts = {key: self.read(part) for key, part in value.items() if key != "kind"}
        return _KINDS[kind](**parts)

    def _linear(self, kind: str, value: dict[str, Any]) -> Linear:
        if kind == "QuantizedLinear":
            # Not kept as it was: only an embedding tied to it is needed in full.
            weight = self._quantize(self._weight(value["weight"]["weight"]), value["part"])
            return QuantizedLinear(weight, self.read(value["bias"])).eval()
        if kind == "StoredLinear":
            outputs, inputs = value["shape"]
            weight = self._stored(value["stored"], (outputs, inputs))
            return QuantizedLinear(weight, self.read(value["bias"])).eval()
        return linear_of(self.read(value["weight"]), self.read(value["bias"]))


class _MappedReader(_Reader):
    def __init__(
        self,
        kept: Mapping[str, Tensor],
        weight: Callable[[str], Tensor],
        shape: Callable[[str], tuple[int, int]],
    ) -> None:
        super().__init__(kept, weight, _not_read, _not_read)
        self._shape = shape

    def _linear(self, kind: str, value: dict[str, Any]) -> Linear:
        if kind == "StoredLinear":
            outputs, inputs = value["shape"]
        elif "kept" in (weight := value["weight"]):
            outputs, inputs = self._kept[weight["kept"]].shape
        else:
            outputs, inputs = self._shape(weight["weight"])
        return MappedLinear(outputs, inputs, self.read(value["bias"]))


def _not_read(*_: object) -> QuantizedWeight:
    raise ValueError("codes of a layer whose weight lies in a file")

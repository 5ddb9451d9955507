"""Chooses how the channels of a checkpoint are scaled before its weights are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..quantization.channel_scales import ALPHAS, channel_scales, output_error
from ..quantization.form import QuantizedWeight
from ..quantization.formats.stored_tensors import StoredTensors
from ..quantization.scale_search import Activations
from .scale_folding import Fold

__all__ = ["ChannelScaling", "LayerScaling", "Rounding", "scale_channels"]

Rounding = Callable[[Tensor, torch.dtype, Tensor], QuantizedWeight]
"""A weight in float32, the type that its scales are rounded to, and the mean squares of inputs."""


@dataclass(frozen=True, slots=True)
class LayerScaling:
    """How a linear layer's inputs are scaled, and what it gains.

    Attributes:
        alpha: the exponent; 0 scales nothing.
        before: ``|error of outputs| / |outputs|`` without scaling.
        after: the same with it.
    """

    alpha: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class ChannelScaling:
    """What becomes of a checkpoint's tensors.

    Attributes:
        layers: those whose inputs can be scaled, by name.
        columns: what a linear layer's weights are multiplied with, ``[inputs]``, by its name.
        rows: what a linear layer's outputs are divided by, ``[outputs]``, by its name.
        norms: tensors of norms that replace the stored ones, by the tensors' names.
    """

    layers: dict[str, LayerScaling] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of that name; in float32 if it is a linear layer's and scaled."""
        if name in self.norms:
            return self.norms[name]
        layer = name.rpartition(".")[0]
        rows, columns = self.rows.get(layer), self.columns.get(layer)
        if name.endswith(".weight") and columns is not None:
            tensor = tensor.float() * columns
        if rows is not None:
            tensor = tensor.float() / (rows if tensor.dim() == 1 else rows.unsqueeze(1))
        return tensor

    def mean_squares(self, layer: str, stored: Tensor) -> Tensor:
        """Of the layer's inputs when they are scaled; ``stored``: as they are."""
        columns = self.columns.get(layer)
        return stored if columns is None else stored / columns.square()

    def add(self, fold: Fold, tensors: StoredTensors, scales: Tensor) -> None:
        """Scale the channels of ``fold`` by what :func:`_realised` gave."""
        for reader in fold.readers:
            self.columns[reader] = fold.spread(scales)
        weight = tensors.read(f"{fold.source}.weight")
        if weight.dim() == 2:
            self.rows[fold.source] = scales
            return
        self.norms[f"{fold.source}.weight"] = fold.divided(weight, scales).to(weight.dtype)
        if f"{fold.source}.bias" in tensors.names:
            bias = tensors.read(f"{fold.source}.bias")
            self.norms[f"{fold.source}.bias"] = (bias.float() / scales).to(bias.dtype)


def scale_channels(
    folds: Iterable[Fold],
    tensors: StoredTensors,
    activations: Activations,
    rounding: Mapping[str, Rounding],
) -> ChannelScaling:
    """For each fold the exponent with which its layers' outputs err least.

    Args:
        folds: whose tensors are all in the checkpoint.
        tensors: of the checkpoint.
        activations: with rows of each fold's first reader.
        rounding: of the layers that are to be quantised, by name.
    """
    scaling = ChannelScaling()
    for fold in folds:
        readers = [name for name in fold.readers if name in rounding]
        rows = activations.rows[fold.readers[0]]
        magnitudes = fold.gathered(rows.abs().mean(0))
        weights = {name: tensors.read(f"{name}.weight") for name in readers}
        source = tensors.read(f"{fold.source}.weight")

        def errors(scales: Tensor) -> list[float]:
            found = []
            for name, weight in weights.items():  # noqa: B023
                columns = fold.spread(scales)  # noqa: B023
                squares = activations.mean_squares[name] / columns.square()
                form = rounding[name](weight.float() * columns, weight.dtype, squares)
                found.append(output_error(form, columns, weight, rows))  # noqa: B023
            return found

        best = before = errors(torch.ones_like(magnitudes))
        chosen, alpha = None, 0.0
        for tried in ALPHAS:
            scales = _realised(fold, source, channel_scales(magnitudes, tried))
            found = errors(scales)
            if _total(found) < _total(best):
                best, chosen, alpha = found, scales, tried
        for name, old, new in zip(readers, before, best, strict=True):
            scaling.layers[name] = LayerScaling(alpha, old, new)
        if chosen is not None:
            scaling.add(fold, tensors, chosen)
    return scaling


def _total(errors: list[float]) -> float:
    return sum(error**2 for error in errors)


def _realised(fold: Fold, source: Tensor, scales: Tensor) -> Tensor:
    """The scales by which ``source`` is divided when it is stored in its own type.

    A norm's weight is rounded to it. What its readers are multiplied with makes up for that.
    """
    if source.dim() == 2:
        return scales
    stored = fold.divided(source, scales).to(source.dtype).float() + fold.offset
    exact = source.float() + fold.offset
    return torch.where((stored != 0) & (exact != 0), exact / stored, scales)

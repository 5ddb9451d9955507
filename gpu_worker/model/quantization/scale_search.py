"""Chooses the scales of a quantised weight by what its layer's inputs are like."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .form import QuantizedWeight

__all__ = ["Activations", "observe", "search_scales", "with_scales"]

_FACTORS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Of the scales that cover all weights: a smaller one clips the largest and rounds others finer."""


def with_scales(form: QuantizedWeight, weight: Tensor, scales: Tensor) -> QuantizedWeight:
    """``weight`` rounded anew, with other scales.

    Args:
        form: linear or e4m3, without a permutation; says all but scales and codes.
        weight: floats ``[outputs, inputs]``.
        scales: float32 ``[outputs, groups]``.
    """
    size = form.group_size or form.inputs
    steps = weight.float() / _spread(scales, size, form.inputs)
    if form.codebook is not None:
        codes = steps.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    elif form.zeros is not None:
        zeros = _spread(form.zeros, size, form.inputs)
        codes = (steps.round() + zeros).clamp(0, 2**form.bits - 1).to(torch.uint8)
    else:
        half = 2 ** (form.bits - 1)
        codes = steps.round().clamp(-half, half - 1).to(torch.int8)
    return replace(form, codes=codes, scales=scales)


def search_scales(
    form: QuantizedWeight, weight: Tensor, importance: Tensor, dtype: torch.dtype
) -> QuantizedWeight:
    """The scales, out of shrunk ones, with the least error of the layer's outputs.

    The error of a group is the sum over its inputs of ``importance * (weight - rounded) ** 2``, the
    outputs' squared error if inputs do not correlate. Clipping by activations is from Lin et al.,
    "AWQ", 2023; the weights of the errors are llama.cpp's importance matrix.

    Args:
        form: linear or e4m3, without a permutation.
        weight: floats ``[outputs, inputs]``.
        importance: float32 ``[inputs]``, see :class:`Activations`.
        dtype: scales are rounded to it.
    """
    best = form
    least = _group_errors(best, weight, importance)
    scales = form.scales.clone()
    for factor in _FACTORS:
        shrunk = (form.scales * factor).to(dtype).float()
        errors = _group_errors(with_scales(form, weight, shrunk), weight, importance)
        better = errors < least
        scales, least = torch.where(better, shrunk, scales), torch.where(better, errors, least)
    return with_scales(form, weight, scales)


@dataclass(frozen=True, slots=True)
class Activations:
    """What the inputs of linear layers are like, by the layers' names.

    Attributes:
        mean_squares: float32 ``[inputs]``, of all rows.
        rows: float32 ``[rows, inputs]``, some of them, of some layers.
    """

    mean_squares: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def observe(
    model: Any,
    names: Iterable[str],
    sequences: Iterable[list[int]],
    sampled: Collection[str] = (),
    rows_each: int = 0,
) -> Activations:
    """What the inputs of linear layers are like.

    Args:
        model: of transformers.
        names: of the layers.
        sequences: token ids; each is computed alone.
        sampled: layers of which rows are kept.
        rows_each: so many of a sequence at most, evenly spread.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    kept: dict[str, list[Tensor]] = {name: [] for name in sampled}
    handles = []

    def watch(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            sums[name] = sums.get(name, torch.zeros(())) + rows.square().sum(0)
            counts[name] = counts.get(name, 0) + len(rows)
            if name in kept:
                kept[name].append(rows[:: -(-len(rows) // rows_each)].clone())

        return add

    try:
        for name in names:
            layer = model.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(watch(name)))
        for ids in sequences:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Activations(
        {name: total / counts[name] for name, total in sums.items()},
        {name: torch.cat(rows) for name, rows in kept.items()},
    )


def _group_errors(form: QuantizedWeight, weight: Tensor, importance: Tensor) -> Tensor:
    """``[outputs, groups]``."""
    size = form.group_size or form.inputs
    errors = (form.dequantize() - weight.float()).square() * importance
    errors = nn.functional.pad(errors, (0, -form.inputs % size))
    return errors.view(form.outputs, -1, size).sum(-1)


def _spread(values: Tensor, size: int, inputs: int) -> Tensor:
    return values.repeat_interleave(size, dim=1)[:, :inputs]

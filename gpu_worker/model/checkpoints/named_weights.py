"""Builds a transformers model from weights that a file of another layout has by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from penstock.shared.errors import ModelError

__all__ = ["NamedWeight", "build_named", "listed", "parameter_bytes"]


class NamedWeight(NamedTuple):
    """A weight that can be read.

    Attributes:
        shape: as the file has it.
        read: gives the values.
        inputs_first: of a factor whether it is ``[inputs, outputs]``; None: not known, or no
            factor.
        stored_as: its name in the file.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    inputs_first: bool | None
    stored_as: str


def parameter_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of all parameters of ``config``'s model in ``dtype``, each once."""
    parameters = _without_memory(config).parameters()
    return sum(parameter.numel() for parameter in parameters) * dtype.itemsize


def build_named(
    path: Path,
    weights: Mapping[str, NamedWeight],
    config: Any,
    dtype: torch.dtype | str,
    remedy: str,
) -> tuple[Any, Any]:
    """The model of ``config`` with ``weights``, on the CPU.

    Args:
        path: of their file, for messages.
        weights: by name; names may have one prefix in common that the model's have not.
        config: of the model.
        dtype: that they are converted to.
        remedy: what to do about weights that are missing.

    Returns:
        The model, and transformers' report of missing and unexpected weights.

    Raises:
        ModelError: weights are missing, damaged or of other shapes than ``config`` says.
    """
    model = _without_memory(config)
    expected = model.state_dict()
    prefix = _prefix(model, expected, weights)
    tied = getattr(model, "all_tied_weights_keys", {})
    found: dict[str, Tensor] = {}
    for name, parameter in expected.items():
        weight = weights.get(prefix + name)
        if weight is not None:
            module = model.get_submodule(name.rpartition(".")[0])
            found[name] = _fitted(path, name, weight, module, tuple(parameter.shape))
    for target, source in tied.items():  # one of the two is enough, whichever it is
        if source not in found and target in found:
            found[source] = found[target]
    missing = sorted(expected.keys() - found.keys() - tied.keys())
    if missing:
        taken = {weights[prefix + name].stored_as for name in found if prefix + name in weights}
        unknown = sorted(
            {
                weight.stored_as
                for weight in weights.values()
                if weight.stored_as not in taken and math.prod(weight.shape) > 1
            }
        )
        others = f"; it has {len(unknown)} of unknown names ({listed(unknown)})" if unknown else ""
        raise ModelError(
            f"{path} lacks {len(missing)} weights ({listed(missing)}){others}; {remedy}"
        )
    kind: Any = type(model)
    built, report = kind.from_pretrained(
        None, config=config, state_dict=found, dtype=dtype, output_loading_info=True
    )
    return built, report


def listed(names: list[str]) -> str:
    """The first few of ``names``."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _without_memory(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _prefix(model: Any, expected: Mapping[str, Tensor], weights: Mapping[str, Any]) -> str:
    """What stands before every name in the file: a wrapper's, as ``module.`` of DataParallel.

    The embedding tells it, because no exporter renames that.
    """
    embedding = model.get_input_embeddings().weight
    name = next((name for name, value in model.named_parameters() if value is embedding), "")
    if name not in expected or name in weights:
        return ""
    found = [stored.removesuffix(name) for stored in weights if stored.endswith(f".{name}")]
    return found[0] if len(found) == 1 else ""


def _fitted(
    path: Path, name: str, weight: NamedWeight, module: nn.Module, shape: tuple[int, ...]
) -> Tensor:
    """The values of ``weight`` in the order of dimensions that ``module`` has them."""
    turned = (isinstance(module, nn.Linear) and weight.inputs_first is True) or (
        isinstance(module, Conv1D) and weight.inputs_first is False
    )
    turned = turned and len(weight.shape) == 2
    found = weight.shape[::-1] if turned else weight.shape
    if found != shape:
        stored = "" if weight.stored_as == name else f" (stored as {weight.stored_as!r})"
        raise ModelError(
            f"{path}: tensor {name!r}{stored} is unusable: its shape is {list(found)}, expected: "
            f"{list(shape)} by config.json; use the config.json that it was exported with"
        )
    values = weight.read()
    return values.T.contiguous() if turned else values

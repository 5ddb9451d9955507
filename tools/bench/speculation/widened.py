"""A model made larger that says the same, to measure what speculation gains at that size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.gpu_worker.model.loading.checkpoint_folder import find_checkpoint
from penstock.shared.errors import ConfigurationError

__all__ = ["write_widened"]

_DEVIATION = 0.02
"""Standard deviation of the new neurons' inputs, that of models at their initialisation."""


def write_widened(model: str, times: int, folder: Path) -> None:
    """Write a checkpoint whose gated MLPs are ``times`` as wide.

    The new neurons read random weights, and their outputs are multiplied by 0. So the text is that
    of the model, and the time of a step that of a larger one.

    Args:
        model: directory of a checkpoint, or ``demo``.
        times: 2 or more.
        folder: an existing directory.

    Raises:
        ModelError: there is no such model.
        ConfigurationError: its MLPs are not those of a Llama.
    """
    source = find_checkpoint(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    generator = torch.Generator().manual_seed(1)
    for layer in getattr(getattr(loaded, "model", None), "layers", (loaded,)):
        linears = dict(getattr(layer, "mlp", nn.Module()).named_children())
        parts = [linears.get(f"{name}_proj") for name in ("gate", "up", "down")]
        if not all(isinstance(part, nn.Linear) and part.bias is None for part in parts):
            raise ConfigurationError(
                f"--widen {times}: the MLPs of {model} are not gated ones without biases; take a "
                "model of the Llama, Mistral or Qwen families, or --widen 1"
            )
        for name in ("gate_proj", "up_proj"):
            weight = linears[name].weight
            rows, columns = weight.shape
            new = torch.randn((times - 1) * rows, columns, generator=generator) * _DEVIATION
            setattr(layer.mlp, name, _linear(torch.cat([weight, new.to(weight.dtype)])))
        weight = linears["down_proj"].weight
        nothing = weight.new_zeros(weight.shape[0], (times - 1) * weight.shape[1])
        layer.mlp.down_proj = _linear(torch.cat([weight, nothing], dim=1))
    loaded.config.intermediate_size *= times
    loaded.save_pretrained(folder)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and not (folder / file.name).exists():
            shutil.copy(file, folder)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear

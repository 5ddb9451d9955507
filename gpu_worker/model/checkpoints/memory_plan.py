"""What a model needs in memory, counted without loading its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..kv.memory_budget import available_bytes
from ..loading import load_gate
from ..loading.checkpoint import load_config, one_line, quiet
from ..loading.checkpoint_folder import find_checkpoint, weight_files
from ..loading.geometry import KVGeometry, probe_geometry
from ..loading.stored_sizes import loaded_bytes, usable_bytes

__all__ = ["FormatPlan", "MemoryPlan", "plan_memory"]

_FORMATS = ("float32", "bfloat16", "int8", "int4")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_INT4_GROUP = 64
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """A model in one number format.

    Attributes:
        name: ``float32``, ``bfloat16``, ``int8`` or ``int4``; of a quantised checkpoint its method.
        weight_bytes: of all weights; about, where they are quantised.
        token_bytes: of one token's keys and values.
        sequences: of the context length that fit beside the weights; 0: none does. Layers with a
            sliding window count as if they kept everything.
        missing_bytes: what lacks for the weights and one sequence; 0 if they fit.
    """

    name: str
    weight_bytes: int
    token_bytes: int
    sequences: int
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a checkpoint needs on a device.

    Attributes:
        parameters: numbers in its weights.
        stored_bytes: of its weight files.
        context: tokens of a sequence that the plan reckons with.
        memory_bytes: of the device that may be used.
        formats: the plan by number format, from the largest.
    """

    parameters: int
    stored_bytes: int
    context: int
    memory_bytes: int
    formats: tuple[FormatPlan, ...]

    @property
    def first_fit(self) -> str | None:
        """The most exact number format that fits; None if none does."""
        return next((plan.name for plan in self.formats if plan.sequences), None)


def plan_memory(
    path: str | Path,
    *,
    context: int | None = None,
    memory_bytes: int | None = None,
    device: torch.device | None = None,
) -> MemoryPlan:
    """Count a checkpoint's weights, keys and values from its configuration alone.

    Args:
        path: the checkpoint; or ``"demo"``.
        context: tokens of a sequence; None takes what the model was made for.
        memory_bytes: what may be used; None asks the device.
        device: where the model is to run; None: the CPU.

    Raises:
        ModelNotFound: there is no such checkpoint.
        ModelError: its configuration is damaged.
        UnsupportedModel: transformers knows no such architecture, or it computes with values even
            where only shapes are asked for.
    """
    device = torch.device("cpu") if device is None else device
    folder = find_checkpoint(path)
    config = load_config(folder)
    model, geometry = _without_memory(config)
    text = config.get_text_config(decoder=True)
    length = context or int(getattr(text, "max_position_embeddings", 0) or 2048)
    memory = available_bytes(device) if memory_bytes is None else memory_bytes
    sizes = _Sizes.of(model, keeps_embedding=device.type == "cpu")
    formats, method = [], _method(folder, config)
    for name in _FORMATS if method is None else (method,):
        dtype = _DTYPES.get(name, torch.bfloat16)
        token = geometry.block_bytes(1, dtype)
        weights = sizes.bytes(name) if method is None else loaded_bytes(folder, dtype)
        room = usable_bytes(memory) - weights
        sequences = max(0, room) // (token * length)
        missing = max(0, token * length - room)
        formats.append(FormatPlan(name, weights, token, sequences, missing))
    stored = sum(file.stat().st_size for file in weight_files(folder))
    return MemoryPlan(sizes.parameters, stored, length, memory, tuple(formats))


def _method(folder: Path, config: Any) -> str | None:
    """How a checkpoint is quantised, which is then the only way to load it; None if it is not."""
    if folder.is_file():
        return "gguf"
    found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    found = getattr(config, "quantization_config", None) or found
    if found is None:
        return None
    name = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(name, "value", name) or "quantised")


def _without_memory(config: Any) -> tuple[nn.Module, KVGeometry]:
    """The model and the shape of its KV, by tensors that have shapes alone."""
    probed = copy.deepcopy(config)
    probed.get_text_config(decoder=True).pad_token_id = None  # GPT-2 looks for it in the input
    meta = torch.device("meta")
    try:
        with quiet(), meta:
            # Grouped products of experts have shapes without memory in bfloat16 only.
            model = AutoModelForCausalLM.from_config(probed, dtype=torch.bfloat16).eval()
        return model, probe_geometry(model, meta).geometry
    except Exception as error:
        why = f"it cannot be planned without its weights ({one_line(error)})"
        raise load_gate.unsupported(config, why) from error


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Parameters by how they are stored.

    Attributes:
        linear: of linear layers but the head.
        outputs: of those layers, for scales by channel.
        head: of the output layer; on a CPU it is packed, also where it is the embedding.
        rest: embeddings, norms and biases.
    """

    linear: int
    outputs: int
    head: int
    rest: int
    tied: bool

    @classmethod
    def of(cls, model: nn.Module, *, keeps_embedding: bool) -> _Sizes:
        head = model.get_output_embeddings()  # type: ignore[operator]
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        linear = sum(module.weight.numel() for module in linears)
        total = sum(parameter.numel() for parameter in model.parameters())
        head_size = 0 if head is None else head.weight.numel()
        tied = head is not None and head.weight is model.get_input_embeddings().weight  # type: ignore[operator]
        rest = total - linear - (0 if tied else head_size)
        outputs = sum(module.out_features for module in linears)
        return cls(linear, outputs, head_size if keeps_embedding or not tied else 0, rest, tied)

    @property
    def parameters(self) -> int:
        """All numbers of the weights, each once."""
        return self.linear + self.rest + (0 if self.tied else self.head)

    def bytes(self, name: str) -> int:
        """Bytes of all weights in a number format; quantised ones keep what is no layer."""
        if name in _DTYPES:
            return (self.linear + self.head + self.rest) * _DTYPES[name].itemsize
        kept = self.rest * torch.bfloat16.itemsize + self.head
        if name == "int8":
            return self.linear + self.outputs * _SCALE_BYTES + kept
        return self.linear // 2 + self.linear // _INT4_GROUP * _SCALE_BYTES + kept

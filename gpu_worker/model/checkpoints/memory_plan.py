"""What a model needs in memory, counted without loading its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..kv.memory_budget import available_bytes
from ..loading import load_gate
from ..loading.checkpoint import load_config, one_line, quantized_source, quiet, stored_quantization
from ..loading.checkpoint_folder import find_checkpoint, weight_files
from ..loading.geometry import KVGeometry, probe_geometry
from ..loading.loader import DTYPES, pick_dtype
from ..loading.stored_sizes import usable_bytes
from ..quantization.expert_stacks import find_mixtures

__all__ = ["FormatPlan", "MemoryPlan", "plan_memory"]

_FULL = ("float32", "bfloat16")
_CODE_BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4}
_COPIED = ("int8", "fp8", "int4")
"""What ``penstock quantize`` writes copies in."""
_GROUP = 64
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """A model in one number format.

    Attributes:
        name: ``float32``, ``bfloat16``, ``int8``, ``fp8``, ``int4`` or ``nf4``; of a quantised
            checkpoint its method.
        dtype: of everything that is not quantised, as in a worker with these settings.
        kv_cache_dtype: ``auto``: keys and values are in ``dtype``, too; or ``int8``, on a GPU
            ``fp8``.
        weight_bytes: of all weights; about, where they are quantised.
        load_bytes: the most that weights take until they are packed: each code has a byte of its
            own. Of ``nf4``, of which there are no copies, the full weights.
        token_bytes: of one token's keys and values.
        sequences: of the context length that fit beside the weights; 0: none does. Layers with a
            sliding window count as if they kept everything.
        missing_bytes: what lacks for loading, or for the weights and one sequence; 0 if they fit.
    """

    name: str
    dtype: str
    kv_cache_dtype: str
    weight_bytes: int
    load_bytes: int
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
        formats: the plan by number format, from the most exact; each also with the KV cache
            in 8 bits.
    """

    parameters: int
    stored_bytes: int
    context: int
    memory_bytes: int
    formats: tuple[FormatPlan, ...]

    @property
    def best_fit(self) -> FormatPlan | None:
        """The most exact plan that fits; None if none does."""
        return next((plan for plan in self.formats if plan.sequences), None)

    @property
    def first_fit(self) -> str | None:
        """Its number format."""
        return None if self.best_fit is None else self.best_fit.name


def plan_memory(
    path: str | Path,
    *,
    context: int | None = None,
    memory_bytes: int | None = None,
    device: torch.device | None = None,
    dtype: str = "auto",
) -> MemoryPlan:
    """Count a checkpoint's weights, keys and values from its configuration alone.

    Of a quantised one tensors are counted by their headers.

    Args:
        path: the checkpoint; or ``"demo"``.
        context: tokens of a sequence; None takes what the model was made for.
        memory_bytes: what may be used; None asks the device.
        device: where the model is to run; None: the CPU.
        dtype: ``model.dtype`` of the worker, which counts beside codes; ``auto`` is float32 on a
            CPU and the checkpoint's own on a GPU.

    Raises:
        ModelNotFound: there is no such checkpoint.
        ModelError: its configuration, or the header of a quantised one's weights, is damaged.
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
    beside = pick_dtype(dtype, device)
    if not isinstance(beside, torch.dtype):  # "auto": the checkpoint's own
        beside = getattr(config, "dtype", None) or torch.float32
    sizes = _Sizes.of(model, keeps_embedding=device.type == "cpu")
    formats: list[FormatPlan] = []
    for name, kept, weights, load in _weights(folder, config, sizes, beside):
        for kv in ("auto", "int8" if device.type == "cpu" else "fp8"):
            laid = replace(geometry, layout=geometry.layout.in_format(kv))
            token = laid.block_bytes(1, kept)
            room = usable_bytes(memory) - weights
            is_loaded = load <= usable_bytes(memory)
            sequences = max(0, room) // (token * length) if is_loaded else 0
            missing = max(0, token * length - room, load - usable_bytes(memory))
            kept_name = str(kept).removeprefix("torch.")
            formats.append(
                FormatPlan(name, kept_name, kv, weights, load, token, sequences, missing)
            )
    stored = sum(file.stat().st_size for file in weight_files(folder))
    return MemoryPlan(sizes.parameters, stored, length, memory, tuple(formats))


def _weights(
    folder: Path, config: Any, sizes: _Sizes, beside: torch.dtype
) -> Iterator[tuple[str, torch.dtype, int, int]]:
    """Of each format its name, what is in full beside codes, and bytes once loaded and before."""
    method = _method(folder, config)
    source = None if method is None else quantized_source(folder, config)
    if method is not None and source is not None:
        found = source.num_bytes(beside)
        # The copy that is packed of a head which is the embedding; a coded one is counted.
        is_tied = sizes.tied and "lm_head" not in source.modules
        head = sizes.head * beside.itemsize if is_tied else 0
        yield method, beside, found.packed + head, found.loaded + head
        return
    for name in _FULL:
        weights = sizes.full_bytes(DTYPES[name])
        yield name, DTYPES[name], weights, weights
    for name, bits in _CODE_BITS.items():
        group = _GROUP if bits == 4 else 0
        copied = name in _COPIED
        packed = (sizes if copied else sizes.with_experts).coded_bytes(bits, group, beside)
        load = sizes.coded_bytes(8, group, beside) if copied else sizes.full_bytes(beside)
        yield name, beside, packed, load


def _method(folder: Path, config: Any) -> str | None:
    """How a checkpoint is quantised, which is then the only way to load it; None if it is not."""
    if folder.is_file():
        return "gguf"
    found = stored_quantization(folder, config)
    if found is None:
        return None
    name = found.get("quant_method")
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
        rest: embeddings, norms, biases and experts.
        experts: of the rest what is rounded at load, but not in copies.
    """

    linear: int
    outputs: int
    head: int
    rest: int
    tied: bool
    experts: int

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
        experts = sum(
            mixture.owner.get_parameter(stack).numel()
            for mixture in find_mixtures(model)
            for stack in mixture.stacks
        )
        counted = head_size if keeps_embedding or not tied else 0
        return cls(linear, outputs, counted, rest, tied, experts)

    @property
    def with_experts(self) -> _Sizes:
        """With experts among the linear layers."""
        linear, rest = self.linear + self.experts, self.rest - self.experts
        return replace(self, linear=linear, rest=rest, experts=0)

    @property
    def parameters(self) -> int:
        """All numbers of the weights, each once."""
        return self.linear + self.rest + (0 if self.tied else self.head)

    def full_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights in ``dtype``."""
        return (self.linear + self.head + self.rest) * dtype.itemsize

    def coded_bytes(self, bits: int, group: int, dtype: torch.dtype) -> int:
        """Bytes with linear layers in codes, and the head and the rest in ``dtype``.

        Args:
            bits: of memory that a code takes.
            group: inputs that share a scale; 0: all.
            dtype: of what has no codes.
        """
        scales = self.linear // group if group else self.outputs
        kept = (self.head + self.rest) * dtype.itemsize
        return self.linear * bits // 8 + scales * _SCALE_BYTES + kept

"""Models in one GGUF file: weights by the names of transformers' modules.

transformers' GGUF support reads configuration and tokenizer. It knows the names, and what
llama.cpp's conversion changed: the order of rows of queries and keys, and norms with a one added.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from penstock.kernels.cpu import Codes
from penstock.shared.errors import ModelError, UnsupportedModel

from ..quantization.coding import Form, common_form
from ..quantization.form import QuantizedWeight
from ..quantization.formats.gguf_blocks import BLOCKS, repack
from ..quantization.formats.quantized_source import SourceBytes, unexpected
from .gguf_settings import ARCHITECTURES, is_a_setting, open_gguf
from .named_weights import listed

__all__ = ["GGUFSource"]

_PLAIN = ("F32", "F16", "BF16")


_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up_proj"}
"""Modules whose weights are parts of one matrix, by the ends of their names."""


class GGUFSource:
    """See :class:`..quantization.formats.quantized_source.QuantizedSource`.

    Args:
        path: of the file.
        config: of the model, as :func:`.gguf_settings.complete_config` leaves it.

    Raises:
        UnsupportedModel: an architecture, a type of tensors or a tensor that is not served.
        ModelError: the file is damaged, or the package gguf is missing.
    """

    def __init__(self, path: Path, config: Any) -> None:
        reader, architecture = open_gguf(path)
        import gguf

        self.path = path
        self._dequantize = gguf.dequantize
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{path} has the architecture {architecture!r}; served from GGUF: "
                f"{', '.join(ARCHITECTURES)}; others from transformers' own checkpoint"
            )
        kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = kind(config=config.to_dict())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = get_gguf_hf_weights_map(model, self._processor)
        unknown = [
            tensor.name
            for tensor in reader.tensors
            if tensor.name not in names and not is_a_setting(tensor.name)
        ]
        if unknown:
            raise UnsupportedModel(
                f"{path} has {len(unknown)} tensors that transformers' {architecture} has no place "
                f"for ({listed(unknown)}), and would compute without them; use the model's own "
                "checkpoint in safetensors"
            )
        self._tensors = {
            names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names
        }
        self._coded = {
            name.removesuffix(".weight"): tensor
            for name, tensor in self._tensors.items()
            if self._kind_of(tensor) not in _PLAIN
        }
        if "model.embed_tokens" in self._coded and config.tie_word_embeddings:
            self._coded["lm_head"] = self._coded["model.embed_tokens"]
        kinds = sorted({tensor.tensor_type.name for tensor in self._tensors.values()})
        self.label = f"GGUF, {', '.join(kinds)}"

    @property
    def modules(self) -> frozenset[str]:
        """See :class:`QuantizedSource`."""
        return frozenset(self._coded)

    def plain(self, dtype: torch.dtype | str) -> dict[str, Tensor]:
        """See :class:`QuantizedSource`."""
        found = {}
        for name, tensor in self._tensors.items():
            if name.removesuffix(".weight") not in self._coded:
                values = self._dequantize(tensor.data, tensor.tensor_type)
                changed = self._processor.process(weights=values, name=tensor.name)
                made = torch.from_numpy(np.array(changed.weights))
                # Now, and not by transformers: that has all of them in float32 at once.
                found[name] = made.to(dtype) if isinstance(dtype, torch.dtype) else made
        return found

    def num_bytes(self, dtype: torch.dtype) -> SourceBytes:
        """See :class:`QuantizedSource`."""
        matrices: dict[str, list[Any]] = {}
        for module, tensor in self._coded.items():
            parent, _, name = module.rpartition(".")
            matrices.setdefault(f"{parent}.{_TOGETHER.get(name, name)}", []).append(tensor)
        total = SourceBytes(0, 0)
        for name, tensors in matrices.items():
            found = _matrix_bytes(tensors, dtype)
            if "embed" in name:  # never packed: the native library has it in full beside
                full = sum(int(tensor.n_elements) for tensor in tensors) * dtype.itemsize
                found = SourceBytes(found.loaded, found.loaded + full)
            total += found
        plain = sum(
            int(tensor.n_elements) * dtype.itemsize
            for name, tensor in self._tensors.items()
            if name.removesuffix(".weight") not in self._coded
        )
        return total + SourceBytes(plain, plain)

    def weight(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        """See :class:`QuantizedSource`."""
        tensor = self._coded[module]
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise self._fault(tensor, f"its shape is {list(found)}, expected: {list(shape)}")
        try:
            data = torch.from_numpy(np.array(tensor.data)).view(shape[0], -1)
            form = repack(tensor.tensor_type.name, data, shape[1])
        except ValueError as error:
            raise self._fault(tensor, str(error)) from error
        rows = np.arange(shape[0]).reshape(-1, 1)
        order = self._processor.process(weights=rows, name=tensor.name).weights.reshape(-1)
        return form if (order == rows[:, 0]).all() else form.rows(torch.from_numpy(order.copy()))

    def stack(self, module: str, shape: tuple[int, int, int]) -> tuple[QuantizedWeight, ...]:
        """See :class:`QuantizedSource`."""
        del shape
        raise unexpected(module)

    def _kind_of(self, tensor: Any) -> str:
        kind = str(tensor.tensor_type.name)
        if kind not in (*_PLAIN, *BLOCKS):
            raise UnsupportedModel(
                f"{self.path}: tensor {tensor.name!r} is {kind}; served: "
                f"{', '.join((*BLOCKS, *_PLAIN))}; convert the full model anew, such as by "
                "llama-quantize to Q4_K_M or Q8_0"
            )
        return kind

    def _fault(self, tensor: Any, why: str) -> ModelError:
        return ModelError(
            f"{self.path}: tensor {tensor.name!r} is unusable: {why}; copy the file again"
        )


def _matrix_bytes(tensors: Sequence[Any], dtype: torch.dtype) -> SourceBytes:
    """Of weights that are parts of one matrix."""
    blocks = [BLOCKS[tensor.tensor_type.name] for tensor in tensors]
    counts = [int(tensor.n_elements) for tensor in tensors]
    inputs = int(tensors[0].shape[0])
    common = common_form(
        [Form(Codes.INT4 if b.bits <= 4 else Codes.INT8, b.group, b.scales == 2) for b in blocks],
        inputs,
    )
    loaded = sum(
        SourceBytes.of_codes(count, block.bits, block.scales * count // block.group).loaded
        for count, block in zip(counts, blocks, strict=True)
    )
    if common is None:
        return SourceBytes(loaded, sum(counts) * dtype.itemsize)
    return SourceBytes(loaded, common.num_bytes(sum(counts) // inputs, inputs))

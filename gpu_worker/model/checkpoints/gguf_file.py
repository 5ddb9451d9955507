"""Models in one GGUF file: weights by the names of transformers' modules.

Names, and what llama.cpp's conversion changed (the order of rows of queries and keys, norms with a
one added), are known to transformers' GGUF support, which reads configuration and tokenizer, too.
"""

from __future__ import annotations

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

from penstock.shared.errors import ModelError, UnsupportedModel

from ..quantization.form import QuantizedWeight
from ..quantization.formats.gguf_blocks import BLOCKS, repack
from ..quantization.formats.quantized_source import unexpected

__all__ = ["GGUFSource"]

_PLAIN = ("F32", "F16", "BF16")
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Whose conversion changes nothing but the order of rows and norms."""


class GGUFSource:
    """See :class:`..quantization.formats.quantized_source.QuantizedSource`.

    Args:
        path: of the file.
        config: of the model, as transformers reads it from the file.

    Raises:
        UnsupportedModel: an architecture, or a type of tensors, that is not served.
        ModelError: the file is damaged, or the package gguf is missing.
    """

    def __init__(self, path: Path, config: Any) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                f"{path} needs the package gguf: pip install 'penstock-llm[gguf]'"
            ) from error
        self.path = path
        self._dequantize = gguf.dequantize
        try:
            reader = gguf.GGUFReader(path)
            architecture = str(reader.fields["general.architecture"].contents())
        except Exception as error:  # whatever a damaged header makes of the reader
            raise ModelError(f"{path} is damaged ({error}); copy it again") from error
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"{path} has the architecture {architecture!r}; served from GGUF: "
                f"{', '.join(_ARCHITECTURES)}; others from transformers' own checkpoint"
            )
        kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = kind(config=config.to_dict())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = get_gguf_hf_weights_map(model, self._processor)
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

    def plain(self) -> dict[str, Tensor]:
        """See :class:`QuantizedSource`."""
        found = {}
        for name, tensor in self._tensors.items():
            if name.removesuffix(".weight") not in self._coded:
                values = self._dequantize(tensor.data, tensor.tensor_type)
                changed = self._processor.process(weights=values, name=tensor.name)
                found[name] = torch.from_numpy(np.array(changed.weights))
        return found

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

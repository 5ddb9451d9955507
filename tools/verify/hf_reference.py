"""The other side of the comparison: the checkpoint as transformers runs it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from penstock.gpu_worker.model.checkpoints.quantized_model import build_quantized
from penstock.gpu_worker.model.loading.checkpoint import load_config, quantized_source
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.quantization.quantized_modules import QuantizedLinear, QuantizedStack
from penstock.gpu_worker.model.quantization.recipe import AUTO, Recipe, quantize_model

__all__ = ["Reference", "load_by_transformers", "load_reference"]


class Reference:
    """A model by transformers alone: eager attention, one sequence at a time.

    Args:
        model: of transformers; its defaults for generation are cleared.
        device: where it lies.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        # The checkpoint's own defaults (penalties, EOS) would be filled in for what is None below.
        model.generation_config = GenerationConfig()
        self._model = model
        self._device = device

    def exact(self) -> Reference:
        """The same weights, computed in float32."""
        return Reference(copy.deepcopy(self._model).float(), self._device)

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy continuation of one prompt, going on past EOS."""
        input_ids = self._tensor(prompt_ids)
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with _quiet():
            output = self._model.generate(
                input_ids,
                # A prompt may hold the padding token, which generate would mask out.
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
            )
        new_ids: list[int] = output[0, len(prompt_ids) :].tolist()
        return new_ids

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 ``[len(token_ids), V]`` of one plain forward without a cache."""
        output: Tensor = self._model(input_ids=self._tensor(token_ids), use_cache=False).logits
        return output[0].float()

    def _tensor(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(token_ids)], device=self._device)


def load_reference(loaded: LoadedModel) -> Reference:
    """Load the checkpoint of ``loaded`` a second time, in the same dtype, on the same device.

    Of one that is quantised, or was when it was loaded, the reference has plain layers over the
    dequantised weights.
    """
    return load_by_transformers(loaded.path, loaded.dtype, loaded.device, loaded.recipe)


def load_by_transformers(
    path: Path, dtype: torch.dtype, device: torch.device, recipe: Recipe = AUTO
) -> Reference:
    """The checkpoint at ``path`` by transformers alone.

    Args:
        path: of the checkpoint.
        dtype: of the weights.
        device: where they go.
        recipe: by which linear layers and experts are quantised; they become plain ones over the
            dequantised weights.

    Raises:
        ModelError: it cannot be read.
    """
    model: Any
    with _quiet():
        config = load_config(path)
        source = quantized_source(path, config)
        if source is not None:
            model, _ = build_quantized(source, config, dtype, dequantised=True)
            model.set_attn_implementation("eager")
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", local_files_only=True
            )
    quantize_model(model, recipe)
    for name, layer in list(model.named_modules()):
        for attribute, value in list(vars(layer).items()):
            if isinstance(value, QuantizedStack):
                full = nn.Parameter(value.dequantize(), requires_grad=False)
                delattr(layer, attribute)
                setattr(layer, attribute, full)
        if isinstance(layer, QuantizedLinear):
            plain: Any = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(layer.quantized.dequantize(dtype), requires_grad=False)
            plain.bias = layer.bias
            model.set_submodule(name, plain)
    return Reference(model.to(device).eval().requires_grad_(False), device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' progress bars and advice on generation."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()

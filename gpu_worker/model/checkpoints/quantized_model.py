"""Builds a transformers model around quantised weights, which are never dequantised as a whole."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..quantization.form import QuantizedWeight
from ..quantization.formats.quantized_source import QuantizedSource, unexpected
from ..quantization.quantized_modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedStack,
)

__all__ = ["build_quantized", "move_quantized"]

log = logging.getLogger(__name__)

_UNUSED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|([qkv]|kv|input|output)_(scale|zero_point))$")
"""What follows from the configuration, and scales of activations and of the KV cache, which are not
rounded by them here."""


class _Vacant(nn.Module):
    """Stands where a quantised linear layer or embedding will be.

    Args:
        module: what the model has there.
    """

    def __init__(self, module: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.shape = (module.weight.shape[0], module.weight.shape[1])
        self.is_linear = isinstance(module, nn.Linear)
        self.factor = float(getattr(module, "scalar_embed_scale", 1.0))
        self.bias = module.bias if isinstance(module, nn.Linear) else None


def build_quantized(
    source: QuantizedSource, config: Any, dtype: torch.dtype | str, *, dequantised: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The model of ``config`` with the weights of ``source``, on the CPU.

    Args:
        source: of the weights.
        config: of the model.
        dtype: of all that is not quantised, and of activations.
        dequantised: every layer is a plain one over its dequantised weight, rounded to ``dtype``:
            what the quantised model is compared with.

    Returns:
        The model, and transformers' report of missing and unexpected weights, but for those
        without which the output is the same.

    Raises:
        ModelError: a tensor is missing, damaged or of another shape.
        UnsupportedModel: something is quantised that has no linear layer in the model.
    """
    config = _plain_config(config, source)
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(base, list | tuple):
        base = next((c for c in base if c.__name__ in (config.architectures or [])), base[0])
    vacancies: dict[str, _Vacant] = {}
    stacks: dict[str, tuple[int, int, int]] = {}

    class Vacated(base):  # type: ignore[misc]
        """The model's class, which leaves out what transformers must neither read nor invent."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in sorted(source.modules):
                _vacate(self, name, vacancies, stacks)

    Vacated.__name__, Vacated.__module__ = base.__name__, base.__module__
    plain = source.plain(dtype)
    spare = {name for name, tensor in plain.items() if _is_spare(name, tensor)}
    model, report = Vacated.from_pretrained(
        None, config=config, state_dict=plain, dtype=dtype, output_loading_info=True
    )
    report["unexpected_keys"] = set(report["unexpected_keys"]) - spare
    model.__class__ = base
    for name, vacant in vacancies.items():
        weight = source.weight(name, vacant.shape)
        module = _module(weight, vacant, model.dtype, dequantised)
        if isinstance(module, QuantizedLinear):
            module.source = (name, "stored")
        model.set_submodule(name, module)
    for name, shape in stacks.items():
        parent, attribute = _parent(model, name)
        stack = QuantizedStack(source.stack(name, shape), model.dtype)
        full = nn.Parameter(stack.dequantize(), requires_grad=False) if dequantised else None
        setattr(parent, attribute, stack if full is None else full)
    return model, report


def _is_spare(name: str, tensor: Tensor) -> bool:
    """Whether a model that has no place for that tensor computes the same without it."""
    # Some writers of GPTQ add biases of zeros.
    return bool(_UNUSED.search(name)) or (name.endswith(".bias") and not bool(tensor.any()))


def move_quantized(model: nn.Module) -> None:
    """Move quantised weights to where the rest of ``model`` lies; ``Module.to`` leaves them."""
    device = next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            module.quantized = module.quantized.to(device)
        for value in vars(module).values():
            if isinstance(value, QuantizedStack):
                value.experts = tuple(weight.to(device) for weight in value.experts)


def _plain_config(config: Any, source: QuantizedSource) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if "lm_head" in source.modules:
        config.tie_word_embeddings = text.tie_word_embeddings = False  # it has codes of its own
    # Experts are taken from a stack one by one, which only this way of computing them does.
    config._experts_implementation = "eager"  # noqa: SLF001
    return config


def _vacate(
    model: Any,
    name: str,
    vacancies: dict[str, _Vacant],
    stacks: dict[str, tuple[int, int, int]],
) -> None:
    try:
        parent, attribute = _parent(model, name)
        found = getattr(parent, attribute)
    except AttributeError:
        raise unexpected(name) from None
    if isinstance(found, nn.Linear | nn.Embedding):
        vacancies[name] = _Vacant(found)
        setattr(parent, attribute, vacancies[name])
    elif isinstance(found, nn.Parameter) and found.dim() == 3:
        experts, inputs, outputs = found.shape
        stacks[name] = (experts, outputs, inputs)
        delattr(parent, attribute)
        setattr(parent, attribute, torch.empty(0))  # transformers initialises what is there
    else:
        raise unexpected(name)


def _parent(model: Any, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _module(
    weight: QuantizedWeight, vacant: _Vacant, dtype: torch.dtype, dequantised: bool
) -> nn.Module:
    if not vacant.is_linear:
        return QuantizedEmbedding(weight, dtype, vacant.factor)
    if not dequantised:
        return QuantizedLinear(weight, vacant.bias)
    outputs, inputs = vacant.shape
    linear = nn.Linear(inputs, outputs, bias=vacant.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.dequantize(dtype), requires_grad=False)
    if vacant.bias is not None:
        linear.bias = vacant.bias
    return linear

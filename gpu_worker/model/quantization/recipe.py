"""How a model's weights are to be quantised when it is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from penstock.shared.errors import ConfigurationError, InsufficientMemory, ModelError
from penstock.shared.settings import ModelSettings

from ..kv.memory_budget import format_bytes
from .expert_stacks import find_mixtures
from .form import QuantizedWeight
from .quantized_modules import QuantizedLinear
from .quantizers import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4

__all__ = ["AUTO", "METHODS", "Recipe", "quantize_model", "recipe_of", "resolve_preferences"]

log = logging.getLogger(__name__)

_HEAD = "lm_head"

METHODS = ("int8", "int4", "nf4", "fp8")
"""What weights are quantised to at load."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings ``model.quantization`` and those that go with it.

    Attributes:
        method: one of :data:`METHODS`; ``auto`` takes the checkpoint as it is, ``none`` refuses one
            that is quantised.
        group_size: inputs that share a scale in int4 and nf4; 0: all.
        symmetric: int4 around zero, instead of between a group's extremes.
        per_tensor: one scale for a whole weight in int8, instead of one for each output.
        head: of the output layer: ``int8``, with a scale for each output; ``same`` as the others;
            ``full``.
        keep: names of modules that stay in full, as shell patterns of the name or its last part.
    """

    method: str = "auto"
    group_size: int = 64
    symmetric: bool = True
    per_tensor: bool = False
    head: str = "int8"
    keep: tuple[str, ...] = ()

    @property
    def quantizes(self) -> bool:
        """Whether it changes weights at load."""
        return self.method in METHODS

    def __str__(self) -> str:
        """What tells two quantised models of one checkpoint apart; ``auto`` where none is made."""
        if not self.quantizes:
            return "auto"
        details = {
            "int8": f" per_tensor={self.per_tensor}",
            "int4": f" group={self.group_size} symmetric={self.symmetric}",
            "nf4": f" group={self.group_size}",
        }
        kept = f" keep={','.join(self.keep)}" if self.keep else ""
        return f"{self.method}{details.get(self.method, '')} head={self.head}{kept}"

    def check(self, quantization: Mapping[str, Any] | None) -> None:
        """Check it against a checkpoint's ``quantization_config``; None: it has none.

        Raises:
            ConfigurationError: they do not go together.
        """
        if quantization is None or self.method == "auto":
            return
        name = quantization.get("quant_method")
        raise ConfigurationError(
            f"model.quantization: got {self.method}, and the checkpoint is quantised already "
            f"({getattr(name, 'value', name) or 'by an unnamed method'}); allowed: auto, which "
            "takes it as it is, or another checkpoint with full weights"
        )

    def part_of(self, name: str) -> Literal["layer", "head"] | None:
        """The part of the model that this dotted name is quantised as; None: it stays in full."""
        last = name.rpartition(".")[2]
        if any(_matches(pattern, name) for pattern in self.keep):
            return None
        if last == _HEAD and self.head != "same":
            return None if self.head == "full" else "head"
        return "layer"

    def quantize(self, weight: Tensor, part: str) -> QuantizedWeight:
        """``weight`` ``[outputs, inputs]`` as that part of a model; see :meth:`part_of`.

        Raises:
            ValueError: a weight is not finite.
        """
        if part == "head":
            return quantize_int8(weight)
        if self.method == "int8":
            return quantize_int8(weight, per_tensor=self.per_tensor)
        if self.method == "int4":
            return quantize_int4(weight, group_size=self.group_size, symmetric=self.symmetric)
        if self.method == "nf4":
            return quantize_nf4(weight, group_size=self.group_size)
        return quantize_fp8(weight)


def resolve_preferences(settings: ModelSettings, *, quantized: bool, on_cpu: bool) -> ModelSettings:
    """``settings`` with what is only preferred decided, for a checkpoint on a device.

    Args:
        settings: a profile's may prefer 8 bits. For weights they give way where they cannot be had,
            and for the KV cache they are in the device's own format.
        quantized: whether the checkpoint comes quantised.
        on_cpu: whether the model runs there.
    """
    decided: dict[str, object] = {}
    if settings.quantization == "prefer-int8":
        decided["quantization"] = "auto" if quantized else "int8"
        if quantized:
            log.info(
                "model.quantization: prefer-int8 gives way to auto: the checkpoint is quantised "
                "already"
            )
    if settings.kv_cache_dtype == "prefer-8bit":
        decided["kv_cache_dtype"] = "int8" if on_cpu else "fp8"
    return settings.model_copy(update=decided)


def recipe_of(settings: ModelSettings) -> Recipe:
    """The recipe that settings ask for."""
    return Recipe(
        settings.quantization,
        settings.quantization_group,
        settings.quantization_zeros == "off",
        settings.quantization_scales == "tensor",
        settings.quantization_head,
        tuple(name.strip() for name in settings.quantization_keep.split(",") if name.strip()),
    )


AUTO = Recipe()
"""The checkpoint as it is."""


def quantize_model(model: Any, recipe: Recipe) -> int:
    """Replace linear layers and stacks of experts by quantised ones, and free their weights.

    Args:
        model: of transformers, with all its weights; changed in place.
        recipe: what to do; nothing if it does not quantise.

    Returns:
        The number of quantised layers and stacks.

    Raises:
        ModelError: a weight is not finite; names it.
        InsufficientMemory: codes do not fit beside the weights.
    """
    if not recipe.quantizes:
        return 0
    _report_unmatched(model, recipe)
    begin, tally = time.perf_counter(), _Tally()
    _quantize_linears(model, recipe, tally)
    _quantize_experts(model, recipe, tally)
    log.info(
        "quantised %d linear layers and %d stacks of experts to %s in %.1f s: %s instead of %s, "
        "and %s until they are packed", tally.linears, tally.stacks, recipe,
        time.perf_counter() - begin, format_bytes(tally.after), format_bytes(tally.before),
        format_bytes(tally.held),
    )  # fmt: skip
    return tally.linears + tally.stacks


def _report_unmatched(model: Any, recipe: Recipe) -> None:
    names = [name for name, _ in model.named_modules()]
    names += [f"{found.name}.{stack}" for found in find_mixtures(model) for stack in found.stacks]
    for pattern in recipe.keep:
        if not any(_matches(pattern, name) for name in names):
            # No error: a draft model is quantised by its target's recipe.
            log.warning("model.quantization_keep: %r matches no module of the model", pattern)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


@dataclass(slots=True)
class _Tally:
    """What was quantised; bytes before, when packed, and until then."""

    linears: int = 0
    stacks: int = 0
    before: int = 0
    after: int = 0
    held: int = 0

    def add(self, full_bytes: int, quantized: Iterable[QuantizedWeight]) -> None:
        self.before += full_bytes
        for weight in quantized:
            self.after += weight.packed_bytes
            self.held += weight.num_bytes


def _quantize_linears(model: Any, recipe: Recipe, tally: _Tally) -> None:
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    for parent_name, parent in list(model.named_modules()):
        for child, layer in list(parent.named_children()):
            name = f"{parent_name}.{child}" if parent_name else child
            # Exactly nn.Linear: a subclass computes something of its own.
            part = recipe.part_of(name) if type(layer) is nn.Linear else None
            if part is None:
                continue
            with _naming(f"{name}.weight"):
                quantized = recipe.quantize(layer.weight, part)
            made = QuantizedLinear(quantized, layer.bias)
            tensor = names.get(layer.weight.data_ptr())
            made.source = None if tensor is None else (tensor, part)
            setattr(parent, child, made.eval())
            tally.linears += 1
            tally.add(layer.weight.nbytes, [quantized])


def _quantize_experts(model: Any, recipe: Recipe, tally: _Tally) -> None:
    for mixture in find_mixtures(model):
        coded: dict[str, list[QuantizedWeight]] = {}
        for stack in mixture.stacks:
            name = f"{mixture.name}.{stack}"
            if recipe.part_of(name) is not None:
                with _naming(name):
                    coded[stack] = [recipe.quantize(w, "layer") for w in mixture.weights(stack)]
        full = {stack: mixture.num_bytes(stack) for stack in coded}
        if coded and mixture.replace(coded, model.dtype):
            tally.stacks += len(coded)
            for stack, weights in coded.items():
                tally.add(full[stack], weights)


@contextmanager
def _naming(tensor: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{tensor}: {error}; use another checkpoint") from error
    except MemoryError as error:
        raise InsufficientMemory(
            f"{tensor}: no memory is left to quantise it; use a larger machine"
        ) from error

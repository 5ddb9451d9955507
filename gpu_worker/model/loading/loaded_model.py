"""A model that is ready to run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..forward.attention_registry import unregister
from ..forward.batch import Forward, PackedStep, forward_logits
from ..forward.forward_context import ForwardContext
from ..kv.kv_pool import KVPool
from ..program.native_decoder import NativeDecoder
from ..quantization.quantized_modules import QuantizedStack
from ..quantization.recipe import AUTO, Recipe
from ..sampling.row_operations import RowOperations, TorchRows
from .geometry import KVGeometry

__all__ = ["LoadedModel"]


@dataclass(eq=False)
class LoadedModel:
    """A model that runs through :class:`ModelRunner`.

    Attributes:
        model: the transformers model, in eval mode, its attention replaced by ours; None for one
            that comes from a record, which ``native`` computes.
        model_type: of its configuration.
        tokenizer: its tokenizer.
        device: where it runs.
        dtype: of its weights and of its KV.
        geometry: of its KV.
        max_model_len: prompt and output tokens of one sequence, at most.
        eos_token_ids: tokens that end an output.
        vocab_size: width of the logits; token ids are below it.
        path: the directory it came from.
        context: carries a step's batch to the attention function.
        attention_name: under which that function is registered with transformers; None: it is not.
        load_seconds: how long loading took.
        native: computes its steps in place of ``model``, whose linear layers then have no weights
            any more; None: ``model`` does.
        recipe: how its weights were quantised.
    """

    model: Any
    model_type: str
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    geometry: KVGeometry
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    path: Path
    context: ForwardContext
    attention_name: str | None
    load_seconds: float
    native: NativeDecoder | None = None
    recipe: Recipe = AUTO

    @property
    def multiplied_weights(self) -> int:
        """Weights that a token is multiplied with: all of linear layers, and of chosen experts."""
        if self.native is not None:
            return self.native.multiplied_weights
        text = self.model.config.get_text_config(decoder=True)
        return _multiplied(self.model, int(getattr(text, "num_experts_per_tok", None) or 1))

    def forward(
        self, step: PackedStep, pool: KVPool, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """Compute ``step``, storing its KV in ``pool``.

        Args:
            step: what to compute.
            pool: where its KV is.
            meanwhile: called once while the device computes, or before this returns.

        Returns:
            The logits of the wanted rows, ``[num_rows, vocab]``. Without columns if the step asks
            for the largest only and they were found without the others: :attr:`row_operations`
            has them.
        """
        if self.native is not None:
            return self.native.forward(step, pool, meanwhile)
        logits = forward_logits(self.model, self.context, step, pool)
        if meanwhile is not None:
            meanwhile()
        return logits

    def prepare(self, step: PackedStep, pool: KVPool) -> Forward:
        """Do what can be done of ``forward(step, pool)`` while another step computes.

        Returns:
            The rest of it, to be called once at most, with what to do meanwhile. The values of
            ``step.input_ids`` are read then.
        """
        if self.native is not None:
            return partial(self.native.run, self.native.prepare(step, pool))
        return partial(self.forward, step, pool)

    @property
    def overlaps(self) -> bool:
        """Whether the calling thread is free for other work while a step computes.

        PyTorch keeps it busy with queuing operations, also on a GPU.
        """
        return self.native is not None and self.native.runtime.threads.threads > 1

    @property
    def row_operations(self) -> RowOperations:
        """What a sampler computes with."""
        return TorchRows() if self.native is None else self.native

    def close(self) -> None:
        """Give the attention function's name back; the model cannot run any more.

        Collecting the model does so, too.
        """
        if self.attention_name is not None:
            unregister(self.attention_name)


def _multiplied(module: Any, chosen: int) -> int:
    for names in (("in_features", "out_features"), ("nx", "nf")):  # the latter of Conv1D
        sizes: list[Any] = [getattr(module, name, None) for name in names]
        if all(isinstance(size, int) for size in sizes):
            return int(math.prod(sizes))
    stacks: list[tuple[int, ...]] = [
        p.shape for p in module.parameters(recurse=False) if p.dim() == 3
    ]
    stacks += [
        (len(value.experts), *value.experts[0].codes.shape)
        for value in vars(module).values()
        if isinstance(value, QuantizedStack)
    ]
    own = sum(min(chosen, shape[0]) * math.prod(shape[1:]) for shape in stacks)
    return own + sum(_multiplied(child, chosen) for child in module.children())

"""The attention function that transformers' layers call, over the paged KV pool.

transformers looks an attention function up by name in a registry of the process. Each loaded
model gets a name of its own, so that several models in one process do not meet, and the name is
given back when the model goes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.kernels.kv_write import write_kv
from penstock.kernels.paged_attention import paged_attention

from .forward_context import ForwardContext

__all__ = [
    "AttentionFunction",
    "PagedAttention",
    "implementation_of",
    "register",
    "registered",
    "unregister",
]


class AttentionFunction(Protocol):
    """What transformers calls in every attention layer.

    Args:
        module: the layer's attention module.
        query: ``[1, Hq, T, Dk]``.
        key: ``[1, Hkv, T, Dk]``.
        value: ``[1, Hkv, T, Dv]``.
        attention_mask: always None: for a name without a mask builder none is built.
        kwargs: ``scaling``, ``sliding_window``, ``softcap``, ``s_aux`` (sinks) and whatever else a
            family passes.

    Returns:
        ``[1, T, Hq, Dv]`` and no attention weights.
    """

    def __call__(  # noqa: D102 - documented above
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]: ...


def register(function: AttentionFunction) -> str:
    """Register ``function`` under a fresh name; returns the name."""
    name = f"penstock_{uuid.uuid4().hex}"
    ALL_ATTENTION_FUNCTIONS[name] = function
    return name


def unregister(name: str) -> None:
    """Give a name from :func:`register` back; does nothing if that has happened."""
    ALL_ATTENTION_FUNCTIONS.pop(name, None)


@contextmanager
def registered(function: AttentionFunction) -> Iterator[str]:
    """The name of ``function`` for as long as the ``with`` lasts."""
    name = register(function)
    try:
        yield name
    finally:
        unregister(name)


def implementation_of(model: Any) -> str:
    """The name under which the model's decoder looks its attention function up."""
    # The only place where transformers keeps it; there is a public setter, but no public getter.
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


class PagedAttention:
    """Writes a layer's new keys and values to the pool and attends over each sequence's blocks.

    Attributes:
        layer_indices: attention module -> index of its KV in the pool. By identity and not by
            the module's ``layer_idx``, which not every family has or numbers from 0.
    """

    def __init__(self, context: ForwardContext, layer_indices: Mapping[nn.Module, int]) -> None:
        self.layer_indices = layer_indices
        self._context = context

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - the batch says who sees whom
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """See :class:`AttentionFunction`."""
        pool, batches = self._context.current()
        layer = pool.layers[self.layer_indices[module]]
        batch = batches[layer.kind]
        # A layer that reuses an earlier layer's KV is handed tensors that are already stored.
        if layer.writes:
            write_kv(
                key[0].transpose(0, 1).to(layer.key.dtype),
                value[0].transpose(0, 1).to(layer.value.dtype),
                layer.key,
                layer.value,
                batch.slots,
            )
        output = paged_attention(
            query[0].transpose(0, 1).to(layer.key.dtype),
            layer.key,
            layer.value,
            batch,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return output.to(query.dtype).unsqueeze(0), None

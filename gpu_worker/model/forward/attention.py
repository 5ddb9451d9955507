"""Attention over the paged KV pool, in the form in which transformers' layers call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from penstock.kernels.kv_write import write_kv
from penstock.kernels.paged_attention import paged_attention

from .forward_context import ForwardContext

__all__ = ["PagedAttention"]


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
        """See :class:`.attention_registry.AttentionFunction`."""
        step = self._context.current()
        layer = step.pool.layers[self.layer_indices[module]]
        batch = step.batches[layer.group]
        # A layer that reuses an earlier layer's KV is handed tensors that are already stored.
        if layer.writes:
            write_kv(
                _in_cache_dtype(key[0].transpose(0, 1), layer.key),
                _in_cache_dtype(value[0].transpose(0, 1), layer.value),
                layer.key,
                layer.value,
                batch.slots,
                block_size=batch.block_size,
            )
        output = paged_attention(
            _in_cache_dtype(query[0].transpose(0, 1), layer.key),
            layer.key,
            layer.value,
            batch,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            workspace=step.workspace,
        )
        return output.to(query.dtype).unsqueeze(0), None


def _in_cache_dtype(states: Tensor, cache: Tensor) -> Tensor:
    """In the cache's dtype; as they are, where the cache is in 8 bits."""
    return states.to(cache.dtype) if cache.is_floating_point() else states

"""Attention over the paged KV pool, in the form in which transformers' layers call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.kv_layout import encode_kv
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
                _stored(key[0].transpose(0, 1), layer.key.dtype),
                _stored(value[0].transpose(0, 1), layer.value.dtype),
                layer.key,
                layer.value,
                batch.slots,
            )
        rows = query[0].transpose(0, 1)
        output = paged_attention(
            rows if layer.key.dtype == torch.int8 else rows.to(layer.key.dtype),
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


def _stored(states: Tensor, dtype: torch.dtype) -> Tensor:
    return encode_kv(states) if dtype == torch.int8 else states.to(dtype)

"""Modules of a model whose weights stay in few bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .form import QuantizedWeight

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "QuantizedStack"]


class QuantizedLinear(nn.Module):
    """A linear layer over a quantised weight, which each call dequantises.

    That is exact and slow. What multiplies by codes takes ``quantized`` instead.

    Args:
        quantized: ``[out_features, in_features]``, on the layer's device.
        bias: ``[out_features]``; None: zeros.

    Attributes:
        source: the checkpoint's tensor that was quantised at load; None: it came quantised.
    """

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.outputs, quantized.inputs
        self.quantized = quantized
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.source: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``; x ``[..., in_features]`` to ``[..., out_features]``."""
        return F.linear(x, self.quantized.dequantize(x.dtype), self.bias)

    def give_up_weight(self) -> None:
        """Free the weight, which another form replaces; the layer computes nothing any more."""
        del self.quantized

    def extra_repr(self) -> str:
        """Shape and bits, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, bits={self.quantized.bits}"


class QuantizedEmbedding(nn.Module):
    """An embedding over a quantised table, of which each call dequantises the rows it reads.

    Args:
        quantized: ``[num_embeddings, embedding_dim]``, without a permutation.
        dtype: of the rows.
        factor: what rows are multiplied with, in ``dtype``.
    """

    def __init__(self, quantized: QuantizedWeight, dtype: torch.dtype, factor: float = 1.0) -> None:
        super().__init__()
        self.quantized = quantized
        self.dtype = dtype
        self.scalar_embed_scale = factor

    @property
    def weight(self) -> Tensor:
        """The whole table, dequantised at every access."""
        return self.quantized.dequantize(self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """``factor * weight[ids]``, ``[..., embedding_dim]``."""
        rows = self.quantized.rows(ids.reshape(-1)).dequantize(self.dtype)
        if self.scalar_embed_scale != 1:
            rows = rows * torch.tensor(self.scalar_embed_scale, dtype=self.dtype)
        return rows.view(*ids.shape, -1)


class QuantizedStack:
    """Stands for a parameter ``[experts, inputs, outputs]``, of which experts are read one by one.

    Args:
        experts: a weight ``[outputs, inputs]`` each.
        dtype: of what is read.
    """

    def __init__(self, experts: Sequence[QuantizedWeight], dtype: torch.dtype) -> None:
        self.experts = tuple(experts)
        self._dtype = dtype

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        """``[inputs, outputs]``, dequantised at every access."""
        return self.experts[int(expert)].dequantize(self._dtype).T

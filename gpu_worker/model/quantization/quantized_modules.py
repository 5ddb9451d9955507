"""Modules of a model whose weights stay in few bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels import PackedWeight, quantized_linear
from penstock.kernels.quantized_linear import pack_codes

from .cpu_operators import MOST_ROWS, OperatorWeight, operator_weight
from .form import QuantizedWeight

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "QuantizedStack", "packed_weight"]


class QuantizedLinear(nn.Module):
    """A linear layer over a quantised weight, which a call dequantises.

    That is exact and slow, so few rows of bfloat16 go through PyTorch's operators for codes where
    these have the weight's form. What multiplies by codes itself takes ``quantized`` instead: the
    native library, and on a GPU the kernel ``quantized_linear``.

    Args:
        quantized: ``[out_features, in_features]``, on the layer's device.
        bias: ``[out_features]``; None: zeros.

    Attributes:
        source: the checkpoint's tensor that was quantised at load, and as what part of the model;
            or the module that came quantised, and ``"stored"``; None: it is not known.
    """

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.outputs, quantized.inputs
        self.quantized = quantized
        self._bits = quantized.bits
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._tried = self._tried_operator = False
        self._packed: PackedWeight | None = None
        self._operand: OperatorWeight | None = None
        self.source: tuple[str, str] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``; x ``[..., in_features]`` to ``[..., out_features]``."""
        if x.is_cuda and not self._tried:
            # The first call on a GPU: from here on the packed form alone is kept.
            self._tried, self._packed = True, packed_weight(self.quantized)
            if self._packed is not None:
                self.give_up_weight()
        if self._packed is not None:
            return quantized_linear(x, self._packed, self.bias)
        if self._goes_to_operator(x) and self._operand is not None:
            y = self._operand.multiply(x.reshape(-1, self.in_features).contiguous())
            y = y.view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.quantized.dequantize(x.dtype), self.bias)

    def give_up_weight(self) -> None:
        """Free the weight, which another form replaces; the layer computes nothing any more."""
        del self.quantized
        self._operand = None

    def _goes_to_operator(self, x: Tensor) -> bool:
        """Whether rows are such that an operator wins; the first ones have the weight packed."""
        rows = x.numel() // self.in_features
        few = x.dtype == torch.bfloat16 and x.device.type == "cpu" and 0 < rows <= MOST_ROWS
        if few and not self._tried_operator:
            self._tried_operator, self._operand = True, operator_weight(self.quantized)
        return few

    def extra_repr(self) -> str:
        """Shape and bits, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, bits={self._bits}"


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
    """Stands for a parameter of all experts' weights, which are read one by one.

    Args:
        experts: a weight ``[outputs, inputs]`` each.
        dtype: of what is read.
        transposed: whether the parameter is ``[experts, inputs, outputs]``, instead of
            ``[experts, outputs, inputs]``.
    """

    def __init__(
        self, experts: Sequence[QuantizedWeight], dtype: torch.dtype, *, transposed: bool = True
    ) -> None:
        self.experts = tuple(experts)
        self._dtype = dtype
        self._transposed = transposed

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        """One expert's part of the parameter, dequantised at every access."""
        weight = self.experts[int(expert)].dequantize(self._dtype)
        return weight.T if self._transposed else weight

    def dequantize(self) -> Tensor:
        """The whole parameter."""
        return torch.stack([self[expert] for expert in range(len(self.experts))])


def packed_weight(form: QuantizedWeight) -> PackedWeight | None:
    """``form`` as the kernel for GPUs takes it; None: it does not take it."""
    group = form.group_size or form.inputs
    power = group >= 16 and group & (group - 1) == 0
    if form.permutation is not None or not (power or group >= form.inputs):
        return None
    bits = 4 if form.bits <= 4 else 8
    device, signed = form.codes.device, form.codes.dtype == torch.int8
    least = 2 ** (bits - 1) if signed else 0
    if form.codebook is not None:
        values = torch.zeros(2**bits, device=device)
        values[: len(form.codebook)] = form.codebook.nan_to_num()
    else:
        values = torch.arange(2**bits, dtype=torch.float32, device=device) - least
    codes = (form.codes.short() + least).to(torch.uint8)
    return PackedWeight(
        bits,
        pack_codes(codes, bits),
        form.scales,
        min(group, form.inputs),
        values,
        None if form.zeros is None else -form.zeros * form.scales,
        form.inputs,
    )

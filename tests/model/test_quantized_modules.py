"""Modules over quantised weights give what plain ones give over the dequantised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.gpu_worker.model.quantization.form import QuantizedWeight
from penstock.gpu_worker.model.quantization.quantized_modules import (
    QuantizedEmbedding,
    QuantizedLinear,
)
from penstock.gpu_worker.model.quantization.quantizers import quantize_int4, quantize_nf4


def weight(outputs: int = 7, inputs: int = 40) -> QuantizedWeight:
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    return quantize_int4(values, group_size=16, symmetric=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer(dtype: torch.dtype) -> None:
    quantized, bias = weight(), torch.randn(7).to(dtype)
    plain = nn.Linear(40, 7, dtype=dtype)
    plain.load_state_dict({"weight": quantized.dequantize(dtype), "bias": bias})
    x = torch.randn(2, 3, 40).to(dtype)
    with torch.inference_mode():
        assert torch.equal(QuantizedLinear(quantized, bias)(x), plain(x))
        assert torch.equal(QuantizedLinear(quantized)(x), nn.functional.linear(x, plain.weight))


def test_an_embedding_reads_rows() -> None:
    quantized = quantize_nf4(torch.randn(50, 32), group_size=8)
    ids = torch.tensor([[3, 49, 3], [0, 1, 2]])
    table = QuantizedEmbedding(quantized, torch.float32, factor=1.5)
    assert torch.equal(table(ids), 1.5 * quantized.dequantize()[ids])
    assert torch.equal(table.weight, quantized.dequantize())


def test_rows_keep_what_belongs_to_them() -> None:
    quantized = weight()
    order = torch.tensor([5, 0, 6])
    assert torch.equal(quantized.rows(order).dequantize(), quantized.dequantize()[order])

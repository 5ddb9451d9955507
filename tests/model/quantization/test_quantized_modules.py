"""Modules over quantised weights give what plain ones give over the dequantised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.gpu_worker.model.quantization.cpu_operators import operator_weight
from penstock.gpu_worker.model.quantization.form import QuantizedWeight
from penstock.gpu_worker.model.quantization.quantized_modules import (
    QuantizedEmbedding,
    QuantizedLinear,
)
from penstock.gpu_worker.model.quantization.quantizers import (
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)


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


OPERATOR_FORMS = {
    "int8": lambda w: quantize_int8(w),
    "int4": lambda w: quantize_int4(w, group_size=64),
    "int4 with zeros": lambda w: quantize_int4(w, group_size=32, symmetric=False),
}


@pytest.mark.parametrize("name", OPERATOR_FORMS)
def test_few_rows_go_through_an_operator(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    quantized = OPERATOR_FORMS[name](torch.randn(48, 128, generator=generator))
    bias = torch.randn(48, generator=generator).bfloat16()
    vectorised = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert (operator_weight(quantized) is not None) == vectorised
    layer, weight = QuantizedLinear(quantized, bias), quantized.dequantize().double()
    for shape in ((1, 128), (2, 4, 128), (16, 128), (17, 128), (0, 128)):
        x = torch.randn(*shape, generator=generator).bfloat16()
        with torch.inference_mode():
            found = layer(x)
        assert found.dtype == torch.bfloat16
        assert found.shape == (*shape[:-1], 48)
        expected = x.double() @ weight.T + bias.double()
        # Scales and results are bfloat16, each at most 2 ** -9 off.
        assert (found.double() - expected).norm() <= 6e-3 * expected.norm()
    x = torch.randn(40, 128, generator=generator).bfloat16()
    by_columns = torch.randn(128, 3, generator=generator).bfloat16().T
    with torch.inference_mode():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight.bfloat16(), bias))
        assert torch.equal(layer(by_columns), layer(by_columns.contiguous()))


@pytest.mark.parametrize(
    "form",
    [
        quantize_nf4(torch.randn(16, 64), group_size=32),
        quantize_int4(torch.randn(16, 64), group_size=16),
        quantize_int4(torch.randn(7, 64), group_size=32),
        quantize_int8(torch.randn(16, 40)),
        replace(quantize_int8(torch.randn(16, 64)), permutation=torch.arange(63, -1, -1)),
    ],
)
def test_forms_without_an_operator_are_dequantised(form: QuantizedWeight) -> None:
    assert operator_weight(form) is None
    x = torch.randn(3, form.inputs).bfloat16()
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, form.dequantize(torch.bfloat16))
        assert torch.equal(QuantizedLinear(form)(x), expected)


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

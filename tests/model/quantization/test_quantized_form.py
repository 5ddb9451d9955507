"""The internal form of quantised weights, and the quantisers that make it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.gpu_worker.model.quantization.form import QuantizedWeight
from penstock.gpu_worker.model.quantization.quantized_modules import packed_weight
from penstock.gpu_worker.model.quantization.quantizers import (
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)
from penstock.kernels import quantized_linear

SIZES = st.integers(1, 70)
GROUPS = st.sampled_from([0, 1, 3, 16, 32, 64])


def weights(outputs: int, inputs: int, seed: int, exponent: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inputs, generator=generator) * 10.0**exponent
    values[:, :: max(1, seed % 7)] *= 0.01
    return values


def by_input(values: Tensor, form: QuantizedWeight) -> Tensor:
    return torch.stack(
        [values[:, k // (form.group_size or form.inputs)] for k in range(form.inputs)], dim=1
    )


@given(SIZES, SIZES, GROUPS, st.booleans(), st.integers(0, 99), st.integers(-30, 30))
@settings(max_examples=60, deadline=None)
def test_integers_are_half_a_scale_off_at_most(
    outputs: int, inputs: int, group: int, symmetric: bool, seed: int, exponent: int
) -> None:
    w = weights(outputs, inputs, seed, exponent)
    for form in (
        quantize_int8(w),
        quantize_int8(w, per_tensor=True),
        quantize_int4(w, group_size=group, symmetric=symmetric),
    ):
        assert form.codes.shape == w.shape
        assert form.scales.shape == (outputs, form.groups)
        error = (form.dequantize() - w).abs()
        assert bool((error <= by_input(form.scales, form) * 0.5001).all())
        # The scales are no larger than the codes need.
        if form.bits == 8:
            assert float(form.scales.max()) <= float(w.abs().max()) / 127 * 1.0001
    assert form.group_size == group


@given(SIZES, SIZES, GROUPS, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_nf4_takes_the_nearest_quantile(outputs: int, inputs: int, group: int, seed: int) -> None:
    w = weights(outputs, inputs, seed)
    form = quantize_nf4(w, group_size=group)
    assert form.codebook is not None
    candidates = by_input(form.scales, form).unsqueeze(2) * form.codebook
    nearest = (candidates - w.unsqueeze(2)).abs().amin(dim=2)
    error = (form.dequantize() - w).abs()
    assert bool((error <= nearest + 1e-6 * by_input(form.scales, form)).all())


@given(SIZES, SIZES, st.integers(0, 99), st.integers(-30, 30))
@settings(max_examples=40, deadline=None)
def test_fp8_keeps_three_bits_of_each_weight(
    outputs: int, inputs: int, seed: int, exponent: int
) -> None:
    w = weights(outputs, inputs, seed, exponent)
    form = quantize_fp8(w)
    error = (form.dequantize() - w).abs()
    assert bool((error <= w.abs() / 16 + form.scales * 2**-9 * 0.51).all())


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4, quantize_nf4, quantize_fp8])
def test_zeros_stay_zeros(quantize: Callable[[Tensor], QuantizedWeight]) -> None:
    w = torch.zeros(3, 130)
    w[1, 5] = 2.0
    assert torch.equal(quantize(w).dequantize()[[0, 2]], w[[0, 2]])
    assert float(quantize(w).dequantize()[1, 5]) == pytest.approx(2.0, rel=0.07)
    assert torch.equal(quantize(torch.full((2, 3), 1e-44)).dequantize(), torch.zeros(2, 3))
    w[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize(w)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4, quantize_nf4, quantize_fp8])
def test_every_tensor_lies_where_the_weight_does(
    quantize: Callable[[Tensor], QuantizedWeight],
) -> None:
    """Another default device stands for a weight on a GPU: what is made without one lies apart."""
    w = weights(3, 70, 5)
    with torch.device("meta"):
        form = quantize(w)
    parts = (form.codes, form.scales, form.codebook)
    assert {part.device for part in parts if part is not None} == {w.device}
    assert torch.equal(form.dequantize(), quantize(w).dequantize())


def test_codes_of_a_permuted_weight_belong_to_other_inputs() -> None:
    w = weights(5, 12, 1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    plain = quantize_int4(w[:, order], group_size=4)
    form = QuantizedWeight(4, plain.codes, plain.scales, group_size=4, permutation=order)
    assert torch.equal(form.dequantize()[:, order], plain.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_for_a_gpu_it_is_the_same_weight(bits: int) -> None:
    w = weights(6, 77, 2)
    forms = [quantize_int8(w), quantize_fp8(w)] if bits == 8 else [
        quantize_int4(w, group_size=16), quantize_int4(w, group_size=32, symmetric=False),
        quantize_nf4(w, group_size=0),
    ]  # fmt: skip
    x = weights(3, 77, 5)
    for form in forms:
        packed = packed_weight(form)
        assert packed is not None
        assert packed.bits == bits
        assert torch.allclose(packed.dequantized(torch.float32), form.dequantize(), atol=1e-6)
        expected = x @ form.dequantize().T
        assert torch.allclose(quantized_linear(x, packed), expected, atol=1e-4)
    with pytest.raises(ValueError, match="3 columns"):
        quantized_linear(x[:, :3], packed)
    assert packed_weight(quantize_int4(w, group_size=24)) is None


def test_dtype_is_rounded_to_last() -> None:
    form = quantize_int4(weights(4, 9, 3), group_size=4, symmetric=False)
    assert torch.equal(form.dequantize(torch.bfloat16), form.dequantize().bfloat16())


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(2, 6, dtype=torch.int8), torch.ones(2, 3)
    zeros, table = torch.zeros(2, 3), torch.zeros(16)
    good = {"bits": 4, "codes": codes, "scales": scales, "group_size": 2}
    assert QuantizedWeight(**good).groups == 3  # type: ignore[arg-type]
    bad: list[tuple[dict[str, object], str]] = [
        ({"bits": 9}, "9 bits"),
        ({"group_size": -1}, "group size of -1"),
        ({"group_size": 4}, "expected: float32 \\[2, 2\\]"),
        ({"scales": scales.double()}, "scales of torch.float64"),
        ({"scales": scales / 0}, "not finite"),
        ({"zeros": zeros}, "expected: torch.uint8"),
        ({"zeros": zeros, "codebook": table, "codes": codes.byte()}, "has no zeros"),
        ({"codes": codes + 8}, "do not fit 4 bits"),
        ({"codes": codes.flatten()}, "matrix"),
        ({"codebook": table[:5], "codes": codes.byte()}, "codebook of \\[5\\]"),
        ({"permutation": torch.zeros(6, dtype=torch.int64)}, "each input once"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            QuantizedWeight(**{**good, **change})  # type: ignore[arg-type]

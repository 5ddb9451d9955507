"""Packed linear layers against torch in float64, on every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import DTYPES, SETS, library, linear, pool, rowwise
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels.cpu import LOGITS, Activation, NativeProgram, NormWeights

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
    Activation.RELU: F.relu,
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1))
    assert error <= TOLERANCE[dtype]


# rows, inputs, outputs: below, at and above a tile, a vector, a panel, a piece of a panel
SHAPES = [
    (1, 1, 1), (1, 64, 32), (2, 33, 31), (5, 17, 65), (12, 129, 48), (13, 300, 40), (64, 96, 96),
    (70, 2, 7), (500, 40, 33),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_shapes(name: str, dtype: torch.dtype) -> None:
    for rows, inputs, outputs in SHAPES:
        x, w = (
            random(rows, inputs, dtype=dtype).float(),
            random(outputs, inputs, seed=1, dtype=dtype),
        )
        bias = random(outputs, seed=2)
        expected = x.double() @ w.double().T + bias.double()
        close(linear(name, x, w, bias=bias), expected, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", SETS)
def test_activations(name: str, activation: Activation) -> None:
    x, w, up = random(7, 24), random(37, 24, seed=1), random(37, 24, seed=2)
    bias = random(74, seed=3)
    gate = x.double() @ w.double().T + bias[:37].double()
    options: dict[str, Any] = {"activation": activation}
    expected = ACTIVATIONS[activation](gate)
    close(linear(name, x, w, bias=bias[:37], **options), expected, torch.float32)
    gated = expected * (x.double() @ up.double().T + bias[37:].double())
    close(linear(name, x, w, up, gated=True, bias=bias, **options), gated, torch.float32)


@pytest.mark.parametrize("name", SETS)
def test_epilogues(name: str) -> None:
    x, q, k = random(9, 24), random(30, 24, seed=1), random(3, 24, seed=2)
    product = x.double() @ torch.cat([q, k]).double().T
    close(linear(name, x, q, k), product, torch.float32)
    capped = 1.5 * torch.tanh(0.25 * product / 1.5)
    close(linear(name, x, q, k, scale=0.25, softcap=1.5), capped, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_residuals_norms_and_an_mlp(name: str, dtype: torch.dtype) -> None:
    hidden, inner, rows = 44, 52, 19
    x = random(rows, hidden)
    gate, up = (random(inner, hidden, seed=s, dtype=dtype) for s in (1, 2))
    down = random(hidden, inner, seed=3, dtype=dtype) / 8
    weight, bias = random(hidden, seed=4), random(hidden, seed=5)
    program = NativeProgram(library(name), dtype)
    stream, wanted = program.buffer(hidden), program.buffer(hidden, outputs=True)
    normed = program.buffer(hidden, multiplied=True, outputs=True)
    mixed = program.buffer(inner, multiplied=True, outputs=True)
    program.embed(x, stream, scale=2.0)
    program.copy(stream, wanted)
    program.norm(NormWeights(hidden, 1e-5, weight, bias, centred=True), wanted, normed)
    program.linear(program.matrix(gate, up, gated=True), normed, mixed, activation=Activation.SILU)
    program.linear(program.matrix(down), mixed, wanted, add=True, scale=0.5)
    program.norm(NormWeights(hidden, 1e-6, weight), wanted, wanted, add=True, scale=0.25)
    program.copy(wanted, normed)
    program.linear(program.matrix(torch.eye(hidden)), normed, LOGITS)
    found = rowwise(program, x, hidden, pool(name))

    y = 2 * x.double()
    n = F.layer_norm(y, (hidden,), weight.double(), bias.double(), 1e-5)
    m = F.silu(n @ gate.double().T) * (n @ up.double().T)
    y = y + 0.5 * (m @ down.double().T)
    y = y + 0.25 * F.rms_norm(y, (hidden,), weight.double(), 1e-6)
    close(found, y, dtype)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40), inputs=st.integers(1, 70), outputs=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES), name=st.sampled_from(SETS),
)  # fmt: skip
def test_any_shape(rows: int, inputs: int, outputs: int, dtype: torch.dtype, name: str) -> None:
    x, w = random(rows, inputs, dtype=dtype).float(), random(outputs, inputs, seed=1, dtype=dtype)
    close(linear(name, x, w), x.double() @ w.double().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_rows_do_not_depend_on_their_neighbours(name: str, dtype: torch.dtype) -> None:
    # Inputs of several pieces, rows of several blocks.
    x, w = random(150, 1100), random(70, 1100, seed=1, dtype=dtype)
    whole = linear(name, x, w)
    for begin, end in ((0, 1), (3, 5), (20, 33), (7, 140)):
        assert torch.equal(linear(name, x[begin:end], w), whole[begin:end])
    for threads in (1, 3):
        assert torch.equal(linear(name, x, w, threads=threads), whole)


@pytest.mark.parametrize("name", SETS)
def test_floats_that_bfloat16_holds_take_half_the_memory_and_give_the_same_bits(name: str) -> None:
    x, last = random(40, 333), random(1, 333, seed=1)
    w, up = (random(44, 333, seed=s, dtype=torch.bfloat16).float() for s in (2, 3))
    program = NativeProgram(library(name), torch.float32)
    program.matrix(w)
    half = program.weight_bytes
    # One output that bfloat16 does not hold keeps all of a matrix in full.
    program.matrix(w, last)
    assert program.weight_bytes - half > 1.9 * half
    for rows in (*range(1, 15), 40):
        full = linear(name, x[:rows], w, last)[:, :44]
        assert torch.equal(linear(name, x[:rows], w), full)
        close(full, x[:rows].double() @ w.double().T, torch.float32)
        gate, more = torch.cat([w, last]), torch.cat([up, last])
        options: dict[str, Any] = {"gated": True, "activation": Activation.SILU}
        gated = linear(name, x[:rows], gate, more, **options)[:, :44]
        assert torch.equal(linear(name, x[:rows], w, up, **options), gated)


@pytest.mark.skipif(len(SETS) < 3, reason="needs two instruction sets with fused multiply-adds")
def test_instruction_sets_give_the_same_bits() -> None:
    x, full = random(9, 200), random(40, 200, seed=1)
    options: dict[str, Any] = {"activation": Activation.SILU}
    for w in (full, full.bfloat16().float()):
        first, *others = (linear(name, x, w, **options) for name in SETS if name != "portable")
        assert all(torch.equal(first, other) for other in others)

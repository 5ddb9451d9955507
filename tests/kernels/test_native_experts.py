"""Mixtures of experts in the native library, against a loop over rows and experts in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import DTYPES, SETS, library, pool, rowwise
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels.cpu import (
    LOGITS,
    Activation,
    Clamp,
    CodedWeight,
    Codes,
    NativeProgram,
    Type,
)

CLAMP = Clamp(1.702, 1.5)


@dataclass(frozen=True)
class Mixture:
    """Weights of a router and of gated experts."""

    router: Tensor
    gates: Tensor
    ups: Tensor
    downs: Tensor
    inner_bias: Tensor | None
    down_bias: Tensor | None
    chosen: int
    normalised: bool
    clamp: Clamp | None


def mixture(
    experts: int, chosen: int, hidden: int, inner: int, *, bias: bool = False,
    normalised: bool = True, clamp: Clamp | None = None, seed: int = 0,
) -> Mixture:  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * shape[-1] ** -0.5

    return Mixture(
        3 * weights(experts, hidden), weights(experts, inner, hidden),
        weights(experts, inner, hidden), weights(experts, hidden, inner),
        torch.randn(experts, 2 * inner, generator=g) if bias else None,
        torch.randn(experts, hidden, generator=g) if bias else None, chosen, normalised, clamp,
    )  # fmt: skip


def matrix(program: NativeProgram, *weights: Tensor, coded: bool, gated: bool = False) -> int:
    parts = [_coded(w) if coded else w.to(program.dtype) for w in weights]
    return program.matrix(*parts, gated=gated)


def _coded(weight: Tensor) -> CodedWeight:
    scales = weight.abs().amax(1, keepdim=True) / 7
    codes = (weight / scales).round().clamp(-8, 7).to(torch.int8) + 8
    return CodedWeight(Codes.INT4, codes.to(torch.uint8), scales, weight.shape[1])


def _decoded(weight: Tensor) -> Tensor:
    parts = [_coded(w) for w in weight]
    return torch.stack([(p.codes.double() - 8) * p.scales.double() for p in parts])


def native(
    m: Mixture, x: Tensor, dtype: torch.dtype, name: str, *, coded: bool = False, threads: int = 2
) -> Tensor:
    """``x + mixture(x)``; the router in full."""
    program, hidden = NativeProgram(library(name), dtype), x.shape[1]
    count, copies = len(m.gates), m.chosen
    router = matrix(program, m.router, coded=False)
    inner = [
        matrix(program, *pair, coded=coded, gated=True) for pair in zip(m.gates, m.ups, strict=True)
    ]
    down = [matrix(program, w, coded=coded) for w in m.downs]
    rows, stream = program.buffer(hidden), program.buffer(hidden, outputs=True)
    numbers = program.buffer(count, outputs=True)
    program.embed(x, rows)
    program.copy(rows, stream)

    def converted(source: int, number: int, columns: int, copies: int = 1) -> int:
        kind = program.input_type(number)
        wanted = program.buffer(columns, kind=kind, outputs=True, copies=copies)
        program.copy(source, wanted)
        return wanted

    program.linear(router, converted(stream, router, hidden), numbers)
    program.route(numbers, count, copies, normalised=m.normalised)
    kind = program.input_type(inner[0])
    gathered = program.buffer(hidden, kind=kind, outputs=True, copies=copies)
    program.gather(converted(stream, inner[0], hidden), gathered)
    width = m.gates.shape[1]
    between = program.buffer(width, outputs=True, copies=copies)
    activation = Activation.SILU if m.clamp is None else Activation.CLAMPED_SWIGLU
    program.experts(
        inner, gathered, between, bias=m.inner_bias, activation=activation, clamp=m.clamp
    )
    computed = program.buffer(hidden, outputs=True, copies=copies)
    program.experts(down, converted(between, down[0], width, copies), computed, bias=m.down_bias)
    program.combine(computed, stream, add=True, scale=0.5)
    eye = program.matrix(torch.eye(hidden).to(dtype))
    program.linear(eye, converted(stream, eye, hidden), LOGITS)
    return rowwise(program, x, hidden, pool(name, threads))


def expected(m: Mixture, x: Tensor, *, coded: bool = False) -> Tensor:
    x = x.double()
    numbers = x @ m.router.double().T
    gates, ups, downs = (_decoded(w) if coded else w.double() for w in (m.gates, m.ups, m.downs))
    found = x.clone()
    for row, of_row in enumerate(numbers):
        top = of_row.topk(m.chosen).indices
        weights = of_row[top].softmax(0) if m.normalised else of_row.softmax(0)[top]
        for weight, e in zip(weights, top.tolist(), strict=True):
            gate, up = gates[e] @ x[row], ups[e] @ x[row]
            if m.inner_bias is not None:
                first, second = m.inner_bias[e].double().chunk(2)
                gate, up = gate + first, up + second
            if m.clamp is None:
                inner = F.silu(gate) * up
            else:
                gate, up = gate.clamp(max=m.clamp.limit), up.clamp(-m.clamp.limit, m.clamp.limit)
                inner = (up + 1) * gate * torch.sigmoid(m.clamp.slope * gate)
            out = downs[e] @ inner
            found[row] += 0.5 * weight * (out if m.down_bias is None else out + m.down_bias[e])
    return found


def rows_of(count: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """That the dtype holds exactly, so that all choose the same experts."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, hidden, generator=g).to(dtype).float()


def in_type(m: Mixture, dtype: torch.dtype) -> Mixture:
    rounded = (w.to(dtype).float() for w in (m.router, m.gates, m.ups, m.downs))
    return Mixture(*rounded, m.inner_bias, m.down_bias, m.chosen, m.normalised, m.clamp)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "hidden", "inner"),
    [(1, 1, 1, 1, 1), (1, 8, 2, 33, 17), (7, 4, 4, 16, 48), (40, 5, 3, 64, 31), (520, 2, 1, 20, 9)],
)
def test_shapes(
    name: str, dtype: torch.dtype, rows: int, experts: int, chosen: int, hidden: int, inner: int
) -> None:
    m = in_type(mixture(experts, chosen, hidden, inner, bias=rows % 2 == 0), dtype)
    x = rows_of(rows, hidden, dtype)
    error = (native(m, x, dtype, name).double() - expected(m, x)).abs().max()
    assert error <= (2e-5 if dtype is torch.float32 else 8e-2)


@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("normalised", [False, True])
def test_activations_and_weights(normalised: bool, clamp: Clamp | None) -> None:
    m = mixture(6, 2, 40, 24, bias=True, normalised=normalised, clamp=clamp)
    x = 3 * rows_of(30, 40, torch.float32)
    found = native(m, x, torch.float32, SETS[0])
    assert torch.allclose(found.double(), expected(m, x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_in_few_bits(dtype: torch.dtype) -> None:
    m = in_type(mixture(5, 2, 64, 32), dtype)
    x = rows_of(21, 64, dtype)
    found = native(m, x, dtype, SETS[0], coded=True)
    error = (found.double() - expected(m, x, coded=True)).abs().max()
    assert error <= (2e-5 if dtype is torch.float32 else 8e-2)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_bits_of_a_row_depend_on_no_other(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    experts = data.draw(st.integers(1, 9))
    chosen, hidden = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 50))
    m = mixture(experts, chosen, hidden, data.draw(st.integers(1, 40)), bias=True)
    x = rows_of(data.draw(st.integers(2, 60)), hidden, dtype)
    whole = native(m, x, dtype, SETS[0], threads=data.draw(st.sampled_from([1, 3])))
    picked = sorted(data.draw(st.sets(st.integers(0, len(x) - 1), min_size=1)))
    assert torch.equal(native(m, x[picked], dtype, SETS[0]), whole[picked])


def test_of_equal_numbers_the_first_count() -> None:
    m = mixture(6, 2, 8, 8)
    m = Mixture(torch.zeros(6, 8), *(getattr(m, n) for n in ("gates", "ups", "downs")),
                None, None, 2, True, None)  # fmt: skip
    x = rows_of(3, 8, torch.float32)
    found = native(m, x, torch.float32, SETS[0]).double()
    first = Mixture(m.router[:2], m.gates[:2], m.ups[:2], m.downs[:2], None, None, 2, True, None)
    assert torch.allclose(found, expected(first, x), atol=1e-5)


def test_what_is_no_number_stays_so() -> None:
    m = mixture(4, 2, 16, 8, bias=True, clamp=CLAMP)
    x = rows_of(3, 16, torch.float32)
    x[1, 5] = torch.nan
    found = native(m, x, torch.float32, SETS[0])
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_operations_that_do_not_fit_are_refused() -> None:
    program = NativeProgram(library(), torch.float32)
    numbers, rows = program.buffer(4), program.buffer(8)
    once, twice = program.buffer(8, copies=1), program.buffer(8, copies=2)
    with pytest.raises(ValueError, match="by a choice"):
        program.gather(rows, twice)
    with pytest.raises(ValueError, match="some of the experts"):
        program.route(numbers, 4, 5, normalised=True)
    with pytest.raises(ValueError, match="columns or type"):
        program.route(rows, 4, 2, normalised=True)
    program.route(numbers, 4, 2, normalised=True)
    with pytest.raises(ValueError, match="once for each"):
        program.gather(rows, once)
    with pytest.raises(ValueError, match="summed"):
        program.combine(once, rows)
    matrices = [program.matrix(torch.zeros(8, 8)), program.matrix(torch.zeros(9, 8))]
    with pytest.raises(ValueError, match="one shape"):
        program.experts(matrices, twice, twice)
    with pytest.raises(ValueError, match="follow one another"):
        program.experts(matrices[::-1], twice, twice)
    with pytest.raises(ValueError, match="copy keeps"):
        program.copy(twice, once)
    assert program.input_type(matrices[0]) is Type.FLOAT


def test_a_clamped_gate_is_of_gated_experts_alone() -> None:
    program = NativeProgram(library(), torch.float32)
    rows, routed = program.buffer(8, multiplied=True), program.buffer(8, copies=2)
    with pytest.raises(ValueError, match="of experts"):
        program.linear(
            program.matrix(torch.zeros(8, 8)), rows, rows, activation=Activation.CLAMPED_SWIGLU
        )
    program.route(program.buffer(4), 4, 2, normalised=True)
    plain = [program.matrix(torch.zeros(8, 8))]
    with pytest.raises(ValueError, match="of gated layers"):
        program.experts(plain, routed, routed, activation=Activation.CLAMPED_SWIGLU)

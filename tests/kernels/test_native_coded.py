"""Linear layers over weights in codes against torch in float64, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import DTYPES, SETS, library, pool, rowwise
from torch import Tensor

from penstock.kernels.cpu import LOGITS, Activation, CodedWeight, Codes, NativeProgram, Type

KINDS = list(Codes)
FOUR_BITS = (Codes.TABLE4, Codes.INT4)


WITH_WHOLE_NUMBERS = [name for name in SETS if name != "portable"] or [
    pytest.param(None, marks=pytest.mark.skip("this CPU decodes all codes in registers"))
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def coded(
    kind: Codes, outputs: int, inputs: int, group: int, *, offsets: bool = False, seed: int = 0
) -> CodedWeight:
    generator = torch.Generator().manual_seed(seed)
    high = 16 if kind in FOUR_BITS else 256
    codes = torch.randint(0, high, (outputs, inputs), generator=generator).to(torch.uint8)
    if kind is Codes.FP8:
        codes[codes & 0x7F == 0x7F] = 0x80  # what is no number becomes minus zero
    groups = -(-inputs // group)
    return CodedWeight(
        kind,
        codes,
        random(outputs, groups, seed=seed + 1) / high,
        group,
        random(outputs, groups, seed=seed + 2) / 4 if offsets else None,
        torch.linspace(-7.5, 7.5, 16).square() / 8 if kind is Codes.TABLE4 else None,
    )


def plain(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """The weight in float64, its values rounded as products in ``dtype`` do."""
    if weight.kind is Codes.INT4:
        values = weight.codes.double() - 8
    elif weight.kind is Codes.TABLE4:
        assert weight.values is not None
        values = weight.values.to(dtype).double()[weight.codes.int()]
    elif weight.kind is Codes.INT8:
        values = weight.codes.view(torch.int8).double()
    else:
        values = weight.codes.view(torch.float8_e4m3fn).double()
    groups = torch.arange(weight.shape[1]) // weight.group
    values = values * weight.scales.double()[:, groups]
    return values if weight.offsets is None else values + weight.offsets.double()[:, groups]


def product(
    name: str, dtype: torch.dtype, x: Tensor, *weights: CodedWeight, gated: bool = False,
    threads: int = 2, **options: Any,
) -> Tensor:  # fmt: skip
    program = NativeProgram(library(name), dtype)
    rows, matrix = program.buffer(x.shape[1]), program.matrix(*weights, gated=gated)
    multiplied = program.buffer(x.shape[1], kind=program.input_type(matrix), outputs=True)
    program.embed(x, rows)
    program.copy(rows, multiplied)
    width = weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)
    program.linear(matrix, multiplied, LOGITS, **options)
    return rowwise(program, x, width, pool(name, threads))


def multiplied(x: Tensor, name: str, dtype: torch.dtype, weight: CodedWeight) -> Tensor:
    """The rows as they are multiplied, in float64: split to fifteen bits for whole numbers."""
    program = NativeProgram(library(name), dtype)
    if program.input_type(program.matrix(weight)) is not Type.SPLIT:
        return x.double()
    pieces = []
    for piece in x.split(1024, dim=1):
        top = piece.abs().amax(dim=1, keepdim=True)
        factor = torch.where(top == 0, 0, torch.full_like(top, 16383) / top)
        pieces.append((piece * factor).round().double() * (top / 16383).double())
    return torch.cat(pieces, dim=1)


def close(found: Tensor, expected: Tensor) -> None:
    """What is multiplied has been rounded before, so the sums are those of float32."""
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1))
    assert error <= 2e-5


def values_of(dtype: torch.dtype, name: str) -> torch.dtype:
    """In which the four-bit values are multiplied."""
    return dtype if name == "avx512bf16" else torch.float32


# rows, inputs, outputs, group: below, at and above a tile, a panel, a unit, a piece, a group
SHAPES = [
    (1, 1, 1, 1), (1, 64, 32, 32), (1, 600, 130, 600), (2, 33, 31, 16), (5, 17, 65, 8),
    (12, 129, 48, 64), (13, 300, 40, 300), (64, 96, 96, 32), (70, 2, 7, 4), (500, 40, 33, 20),
    (9, 1030, 70, 128), (13, 2500, 33, 1056), (12, 2500, 33, 1024),
]  # fmt: skip


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_shapes(name: str, dtype: torch.dtype, kind: Codes, offsets: bool) -> None:
    for rows, inputs, outputs, group in SHAPES:
        x = random(rows, inputs, dtype=dtype).float()
        weight = coded(kind, outputs, inputs, group, offsets=offsets, seed=rows)
        given = multiplied(x, name, dtype, weight)
        close(product(name, dtype, x, weight), given @ plain(weight, values_of(dtype, name)).T)


@pytest.mark.parametrize("name", SETS)
def test_every_code_stands_for_its_value(name: str) -> None:
    for dtype in DTYPES:
        for kind in KINDS:
            codes = torch.arange(16 if kind in FOUR_BITS else 256).to(torch.uint8)
            weight = coded(kind, 1, len(codes), len(codes))
            weight.codes[0] = torch.where(weight.codes[0] > 300, weight.codes[0], codes)
            if kind is Codes.FP8:
                weight.codes[0][codes & 0x7F == 0x7F] = 0
            weight.scales.fill_(1)
            found = product(name, dtype, torch.eye(len(codes)), weight)[:, 0]
            expected = plain(weight, values_of(dtype, name))[0]
            assert torch.allclose(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", SETS)
def test_epilogues(name: str) -> None:
    x = random(9, 48)
    gate, up = (coded(Codes.TABLE4, 37, 48, 16, offsets=True, seed=s) for s in (1, 7))
    bias = random(74, seed=3)
    left, right = (plain(w, torch.float32) for w in (gate, up))
    stacked = torch.cat([x.double() @ left.T, x.double() @ right.T], 1) + bias.double()
    found = product(name, torch.float32, x, gate, up, bias=bias, scale=0.5, softcap=3.0)
    close(found, 3 * torch.tanh(0.5 * stacked / 3))
    options: dict[str, Any] = {"bias": bias, "activation": Activation.SILU, "gated": True}
    gated = torch.nn.functional.silu(stacked[:, :37]) * stacked[:, 37:]
    close(product(name, torch.float32, x, gate, up, **options), gated)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), inputs=st.integers(1, 300), outputs=st.integers(1, 70),
    group=st.integers(1, 80), offsets=st.booleans(), kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES), name=st.sampled_from(SETS),
)  # fmt: skip
def test_any_shape(
    rows: int, inputs: int, outputs: int, group: int, offsets: bool, kind: Codes,
    dtype: torch.dtype, name: str,
) -> None:  # fmt: skip
    x = random(rows, inputs, dtype=dtype).float()
    weight = coded(kind, outputs, inputs, min(4 * group, inputs), offsets=offsets)
    given = multiplied(x, name, dtype, weight)
    close(product(name, dtype, x, weight), given @ plain(weight, values_of(dtype, name)).T)


@pytest.mark.parametrize("kind", [Codes.INT4, Codes.INT8])
def test_split_activations_are_exact_enough(kind: Codes) -> None:
    weight = coded(kind, 40, 2100, 2100)

    def errors(x: Tensor) -> tuple[float, float]:
        expected = x.double() @ plain(weight, torch.float32).T
        rounded = x.bfloat16().double() @ plain(weight, torch.float32).T
        found = product(SETS[0], torch.bfloat16, x, weight).double()
        size = expected.norm()
        return float((found - expected).norm() / size), float((rounded - expected).norm() / size)

    x = random(5, 2100)
    split, rounded = errors(x)
    if SETS[0] != "portable":
        assert split < rounded / 5
    # One value far above the others, as the inputs of some layers have.
    x[:, 77] = 300
    assert errors(x)[0] < 1e-3


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("kind", [Codes.INT4, Codes.INT8])
@pytest.mark.parametrize("name", WITH_WHOLE_NUMBERS)
def test_sums_of_whole_numbers_are_exact(name: str, kind: Codes, offsets: bool) -> None:
    # The largest factors of one sign, for as long as a piece is: sums of 2 ** 31 less a few.
    inputs, outputs = 1024, 40
    generator = torch.Generator().manual_seed(1)
    ends = (0, 15) if kind is Codes.INT4 else (128, 127)
    codes = torch.tensor(ends)[torch.randint(0, 2, (outputs, inputs), generator=generator)]
    codes[0], codes[1], codes[2, ::2], codes[3, ::4] = ends[0], ends[1], ends[0], ends[1]
    weight = CodedWeight(
        kind, codes.to(torch.uint8), torch.ones(outputs, 1), inputs,
        torch.ones(outputs, 1) if offsets else None,
    )  # fmt: skip
    values = codes - 8 if kind is Codes.INT4 else codes.to(torch.uint8).view(torch.int8).long()
    x = torch.randint(-16383, 16384, (13, inputs), generator=generator)
    x[:4], x[4, ::2], x[5, ::4], x[:, 0] = 16383, -16383, 16383, 16383
    x[1] = -16383
    for rows in range(1, 14):  # every size of tile, and two tiles
        expected = (x[:rows] @ values.T).float()
        if offsets:
            expected = (expected.double() + x[:rows].sum(dim=1, keepdim=True)).float()
        assert torch.equal(product(name, torch.bfloat16, x[:rows].float(), weight), expected)


@pytest.mark.skipif(
    len(WITH_WHOLE_NUMBERS) < 2, reason="this CPU has one instruction set with them"
)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("kind", [Codes.INT4, Codes.INT8])
def test_whole_numbers_give_the_same_bits_on_every_instruction_set(
    kind: Codes, offsets: bool
) -> None:
    # Parts of pieces, pieces as parts, parts that end within a piece, and one part.
    for rows, inputs, group in ((16, 1536, 64), (13, 2500, 1024), (13, 2500, 1056), (12, 576, 576)):
        x = random(rows, inputs, dtype=torch.bfloat16).float()
        weight = coded(kind, 40, inputs, group, offsets=offsets, seed=rows)
        first, *others = (product(name, torch.bfloat16, x, weight) for name in WITH_WHOLE_NUMBERS)
        for other in others:
            assert torch.equal(other, first)


def test_what_is_no_number_stays_with_its_row() -> None:
    weight, x = coded(Codes.INT8, 33, 64, 64), random(4, 64)
    for value in (torch.nan, torch.inf):
        broken = x.clone()
        broken[2, 5] = value
        found = product(SETS[0], torch.bfloat16, broken, weight)
        assert not found[2].isfinite().any()
        rest = product(SETS[0], torch.bfloat16, x, weight)
        assert torch.equal(found[[0, 1, 3]], rest[[0, 1, 3]])
    assert not product(SETS[0], torch.bfloat16, torch.zeros(1, 64), weight).any()


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_rows_do_not_depend_on_their_neighbours(
    name: str, dtype: torch.dtype, kind: Codes, offsets: bool
) -> None:
    # Groups of several pieces, a short last one, panels by twos and one left over.
    x, weight = random(150, 1100), coded(kind, 170, 1100, 512, offsets=offsets)
    whole = product(name, dtype, x, weight)
    # One row and two panels at a time, rows in registers, and weights decoded first.
    for begin, end in ((0, 1), (3, 5), (11, 23), (20, 33), (7, 140)):
        assert torch.equal(product(name, dtype, x[begin:end], weight), whole[begin:end])
    for threads in (1, 3):
        assert torch.equal(product(name, dtype, x, weight, threads=threads), whole)


def test_parts_and_groups_that_do_not_fit_are_refused() -> None:
    program = NativeProgram(library(), torch.float32)
    four, eight = (coded(kind, 4, 32, 16) for kind in (Codes.INT4, Codes.INT8))
    with pytest.raises(ValueError, match="coded differently"):
        program.matrix(four, eight)
    with pytest.raises(ValueError, match="coded differently"):
        program.matrix(four, torch.zeros(4, 32))
    with pytest.raises(ValueError, match="only some parts of a matrix"):
        program.matrix(torch.zeros(4, 32), four)
    with pytest.raises(ValueError, match="do not fill its units"):
        program.matrix(coded(Codes.INT4, 4, 32, 6))

"""Weights with short exponents give the bits that weights in full give.

In float32, too: weights that bfloat16 holds are kept in 16 bits, or in 12.
Two inputs more, which are zero, keep a matrix in full: its inputs no longer fill units of four.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import DTYPES, SETS, library, linear, pool, rowwise
from torch import Tensor

from penstock.kernels.cpu import (
    LOGITS,
    Activation,
    MappedPart,
    MatrixForm,
    NativeProgram,
    Type,
)
from penstock.kernels.cpu.weight_matrices import WeightMatrices

HAVE = [name for name in SETS if library(name).has_short_exponents()]
LACKING = pytest.param("", marks=pytest.mark.skip(reason="the CPU has no AVX-512 with VBMI"))
where_short = pytest.mark.parametrize("name", HAVE or [LACKING])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_full(name: str, x: Tensor, *weights: Tensor, **options: object) -> Tensor:
    return linear(name, F.pad(x, (0, 2)), *(F.pad(w, (0, 2)) for w in weights), **options)


def num_bytes(name: str, *weights: Tensor, gated: bool = False) -> int:
    program = NativeProgram(library(name), weights[0].dtype)
    program.matrix(*weights, gated=gated)
    return program.weight_bytes


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all bits are, but for those of what is not a number."""
    numbers = torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    return numbers and torch.equal(found.isnan(), expected.isnan())


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).bfloat16()


WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "widened": lambda *shape, seed=0: bf16(*shape, seed=seed).float(),
    "bf16": bf16,
}


def with_exceptions(weights: Tensor) -> Tensor:
    """Few enough are very small or large, zero of either sign, or next to each other."""
    unusual = torch.tensor([1e-30, -3e20, 0.0, -0.0, 1e-38]).bfloat16().to(weights.dtype)
    flat = weights.clone().view(-1)
    for begin in (3, 4, 37):
        places = torch.arange(min(begin, len(flat)), len(flat), 6400)
        flat[places] = unusual[torch.arange(len(places)) % len(unusual)]
    return flat.view_as(weights)


@pytest.mark.parametrize("kind", WEIGHTS)
@where_short
def test_same_bits_for_less_memory(name: str, kind: str) -> None:
    # Inputs of one unit, of a piece, of several; outputs of a part of a panel and of several.
    for inputs, outputs in ((4, 7), (256, 70), (1100, 100)):
        w = with_exceptions(WEIGHTS[kind](outputs, inputs, seed=1))
        size, full = num_bytes(name, w), num_bytes(name, F.pad(w, (0, 2)))
        assert inputs == 4 or size < full * 0.78
        x = random(60, inputs)
        expected = in_full(name, x, w)
        for rows in (*range(1, 27), 60):
            assert same(linear(name, x[:rows], w), expected[:rows])


@pytest.mark.parametrize("kind", WEIGHTS)
@where_short
def test_parts_of_a_matrix_share_panels(name: str, kind: str) -> None:
    # Neither part fills its last panel. Of a gated one, two outputs share each byte of codes.
    q, k, v = (with_exceptions(WEIGHTS[kind](40, 640, seed=s)) for s in (1, 2, 3))
    x = random(19, 640)
    assert same(linear(name, x, q, k, v), in_full(name, x, q, k, v))
    options = {"gated": True, "activation": Activation.SILU}
    assert num_bytes(name, q, k, gated=True) < num_bytes(
        name, F.pad(q, (0, 2)), F.pad(k, (0, 2)), gated=True
    )
    assert same(linear(name, x, q, k, **options), in_full(name, x, q, k, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@where_short
def test_what_is_no_number_stays_none(name: str, dtype: torch.dtype) -> None:
    w = bf16(64, 96).to(dtype)
    w[3, 5], w[40, 95], w[63, 0] = torch.inf, torch.nan, -torch.inf
    x = random(14, 96)
    assert num_bytes(name, w) < num_bytes(name, F.pad(w, (0, 2)))
    assert same(linear(name, x, w), in_full(name, x, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@where_short
def test_too_many_exceptions_keep_a_matrix_in_full(name: str, dtype: torch.dtype) -> None:
    # Exponents all over their range, of which eight pairs are not nearly all.
    w = (random(64, 96) * 2.0 ** random(64, 96, seed=1).mul(12).round()).bfloat16().to(dtype)
    assert num_bytes(name, w) == 64 * 96 * 2
    x = random(14, 96)
    assert same(linear(name, x, w), in_full(name, x, w))


@settings(max_examples=25, deadline=None)
@given(
    units=st.integers(1, 70), outputs=st.integers(1, 70), rows=st.integers(1, 40),
    lowest=st.integers(1, 200), spread=st.integers(0, 20), seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES), name=st.sampled_from(HAVE or SETS),
)  # fmt: skip
def test_any_exponents_and_shape(
    units: int, outputs: int, rows: int, lowest: int, spread: int, seed: int,
    dtype: torch.dtype, name: str,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shape = outputs, 4 * units
    exponents = torch.randint(lowest, lowest + spread + 1, shape, generator=generator)
    rest = torch.randint(0, 1 << 24, shape, generator=generator)
    bits = (rest >> 23) << 31 | exponents << 23 | rest & 0x7FFFFF
    w = (bits >> 16 << 16).to(torch.int32).view(torch.float32).to(dtype)
    x = random(rows, 4 * units, seed=seed % 97)
    assert same(linear(name, x, w), in_full(name, x, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@where_short
def test_exceptions_lie_in_the_file_of_packed_weights(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    w, x = with_exceptions(bf16(70, 480, seed=1).to(dtype)), random(13, 480)
    program = NativeProgram(library(name), dtype)
    program.matrix(w)
    packed = program.write_weights(tmp_path / "weights")
    (form,) = packed.forms
    assert form.exceptions > 5
    mapped = NativeProgram(library(name), dtype, packed)
    rows = mapped.buffer(480)
    mapped.embed(x, rows)
    wanted = mapped.buffer(480, multiplied=True, outputs=True)
    mapped.copy(rows, wanted)
    mapped.linear(mapped.matrix(MappedPart(*w.shape)), wanted, LOGITS)
    assert same(rowwise(mapped, x, 70, pool(name)), in_full(name, x, w))

    # Behind three panels of 120 units lies the index of their exceptions.
    data, index = bytearray(packed.path.read_bytes()), 3 * 120 * 192
    data[index + 4 : index + 8] = b"\xff\xff\xff\x7f"
    packed.path.write_bytes(data)
    with pytest.raises(ValueError, match="exceptions that are not there"):
        NativeProgram(library(name), dtype, packed).matrix(MappedPart(*w.shape))


@pytest.mark.parametrize("kind", WEIGHTS)
@where_short
def test_known_forms_save_the_look_at_all_weights(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [with_exceptions(WEIGHTS[kind](70, 256, seed=seed)) for seed in (1, 2)]

    def made(forms: tuple[MatrixForm, ...] | None, *weights: Tensor) -> NativeProgram:
        program = NativeProgram(library(name), weights[0].dtype, forms=forms)
        x = program.buffer(256)
        program.embed(random(60, 256), x)
        y = program.buffer(256, multiplied=True, outputs=True)
        program.copy(x, y)
        program.linear(program.matrix(*weights), y, LOGITS)
        return program

    first = made(None, *weights)
    expected = rowwise(first, random(19, 256), 140, pool(name))
    monkeypatch.setattr(WeightMatrices, "_form", None)
    second = made(first.forms, *weights)
    assert second.weight_bytes == first.weight_bytes
    assert same(rowwise(second, random(19, 256), 140, pool(name)), expected)
    with pytest.raises(ValueError, match="matrix 0 of 70 outputs is not known as such"):
        made(first.forms, weights[0])
    with pytest.raises(ValueError, match="which does not lie in a file"):
        NativeProgram(library(name), weights[0].dtype, forms=first.forms).matrix(
            MappedPart(140, 256)
        )
    unusual = made(first.forms, *(weight * 2.0**40 for weight in weights))
    with pytest.raises(ValueError, match="more exceptions than there is room for"):
        unusual.pack()


@where_short
def test_matrices_that_are_added_later_leave_the_others(name: str) -> None:
    w, x = with_exceptions(bf16(70, 480, seed=1)), random(13, 480)
    assert num_bytes(name, w) < num_bytes(name, F.pad(w, (0, 2)))
    program = NativeProgram(library(name), torch.bfloat16)
    rows = program.buffer(480)
    program.embed(x, rows)
    wanted = program.buffer(480, multiplied=True, outputs=True)
    program.copy(rows, wanted)
    program.linear(program.matrix(w), wanted, LOGITS)
    program.pack()
    program.matrix(w)
    assert same(rowwise(program, x, 70, pool(name)), in_full(name, x, w))


@where_short
def test_the_library_refuses_what_cannot_be(name: str) -> None:
    lib = library(name)
    exponents = bytes(range(56, 64))
    program = lib.create(Type.FLOAT)
    try:
        for outputs, inputs, kind, given, exceptions, says in (
            (32, 6, Type.BF16, exponents, 0, "no matrix for short exponents"),
            (32, 8, Type.BF16, exponents, -1, "no matrix for short exponents"),
            (32, 8, Type.BF16, bytes([200] * 8), 0, "seven bits of an exponent"),
        ):
            with pytest.raises(ValueError, match=says):
                lib.checked("short_matrix", program, outputs, inputs, kind, 0, given, exceptions)
        number = lib.checked("short_matrix", program, 1, 4, Type.BF16, 0, exponents, 1)
        source = torch.tensor([[1.0, 1e-30, 1.0, 1e30]])
        lib.checked("fill", program, number, source.data_ptr(), Type.FLOAT, 0, 1, 0)
        with pytest.raises(ValueError, match="more exceptions than there is room for"):
            lib.checked("seal", program)
    finally:
        lib.destroy(program)


@where_short
def test_counts_of_exponents(name: str) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0, 1e-38, torch.inf])
    for source in (values, values.bfloat16()):
        counts = (ctypes.c_int64 * 128)()
        library(name).count_exponents(
            source.data_ptr(), Type.FLOAT if source.dtype is torch.float32 else Type.BF16,
            len(source), counts,
        )  # fmt: skip
        bits = [
            struct.unpack("<I", struct.pack("<f", v))[0] for v in source.bfloat16().float().tolist()
        ]
        assert sum(counts) == len(values)
        assert all(
            counts[b >> 24 & 127] == sum(b >> 24 & 127 == c >> 24 & 127 for c in bits) for b in bits
        )

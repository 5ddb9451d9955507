"""A program over packed weights in a file computes what the one that wrote them computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_programs import SETS, library, pool, rowwise
from torch import Tensor

from penstock.kernels.cpu import (
    LOGITS,
    CodedWeight,
    Codes,
    MappedPart,
    MatrixForm,
    NativeProgram,
    Type,
    WeightsFile,
)

INPUTS, OUTPUTS, ROWS = 96, 70, 19

Weight = Tensor | CodedWeight | MappedPart


def numbers(outputs: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, INPUTS, generator=generator).to(dtype)


def coded(kind: Codes, outputs: int, seed: int, *, offsets: bool = False) -> CodedWeight:
    generator = torch.Generator().manual_seed(seed)
    least, most = (0, 16) if kind in (Codes.INT4, Codes.TABLE4) else (-127, 128)
    codes = torch.randint(least, most, (outputs, INPUTS), generator=generator)
    scales = torch.rand(outputs, 3, generator=generator)
    return CodedWeight(
        kind,
        codes.to(torch.uint8 if least == 0 else torch.int8),
        scales,
        32,
        scales - 0.5 if offsets else None,
        torch.linspace(-1, 1, 16) if kind is Codes.TABLE4 else None,
    )


MATRICES: dict[str, Callable[[], tuple[torch.dtype, list[Weight], bool]]] = {
    "full": lambda: (
        torch.float32,
        [numbers(OUTPUTS, 1, torch.float32), numbers(30, 2, torch.float32)],
        False,
    ),
    "widened": lambda: (
        torch.float32, [numbers(OUTPUTS, 1, torch.bfloat16).float()], False
    ),
    "bf16-gated": lambda: (
        torch.bfloat16, [numbers(OUTPUTS, seed, torch.bfloat16) for seed in (1, 2)], True
    ),
    "int4": lambda: (torch.bfloat16, [coded(Codes.INT4, OUTPUTS, 1)], False),
    "int8-offsets": lambda: (
        torch.bfloat16, [coded(Codes.INT8, OUTPUTS, seed, offsets=True) for seed in (1, 2)], False
    ),
    "table-gated": lambda: (
        torch.float32, [coded(Codes.TABLE4, OUTPUTS, seed) for seed in (1, 2)], True
    ),
}  # fmt: skip


def program_of(
    name: str, dtype: torch.dtype, weights: list[Weight], gated: bool, packed: WeightsFile | None
) -> tuple[NativeProgram, int]:
    """One layer whose matrix is the second of two alike, and how many outputs it has."""
    program = NativeProgram(library(name), dtype, packed)
    rows = program.buffer(INPUTS)
    program.embed(numbers(ROWS, 9, torch.float32), rows)
    outputs = weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights)
    matrices = [program.matrix(*weights, gated=gated) for _ in range(2)]
    wanted = program.buffer(INPUTS, kind=program.input_type(matrices[0]), outputs=True)
    program.copy(rows, wanted)
    program.linear(matrices[1], wanted, LOGITS)
    return program, outputs


def parts_of(weights: list[Weight]) -> list[Weight]:
    return [MappedPart(*weight.shape) for weight in weights]


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", SETS)
def test_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    dtype, weights, gated = MATRICES[kind]()
    first, outputs = program_of(name, dtype, weights, gated, None)
    x = numbers(ROWS, 9, torch.float32)
    expected = rowwise(first, x, outputs, pool(name))
    packed = first.write_weights(tmp_path / "weights")
    assert packed.num_bytes == packed.path.stat().st_size
    assert tuple(MatrixForm.of_json(form.to_json()) for form in packed.forms) == packed.forms
    before = packed.path.read_bytes()
    second, _ = program_of(name, dtype, parts_of(weights), gated, packed)
    assert torch.equal(rowwise(second, x, outputs, pool(name)), expected)
    assert second.weight_bytes == first.weight_bytes
    assert packed.path.read_bytes() == before
    assert second.write_weights(tmp_path / "again").forms == packed.forms
    assert (tmp_path / "again").read_bytes() == before


@pytest.fixture
def packed(tmp_path: Path) -> WeightsFile:
    program, _ = program_of(SETS[0], torch.bfloat16, bf16(), False, None)
    return program.write_weights(tmp_path / "weights")


def bf16() -> list[Weight]:
    return [numbers(OUTPUTS, 1, torch.bfloat16)]


def test_what_does_not_fit_the_file_is_refused(packed: WeightsFile) -> None:
    def make(weights: list[Weight], given: WeightsFile, gated: bool = False) -> None:
        program_of(SETS[0], torch.bfloat16, weights, gated, given)

    for weights, gated in (
        ([MappedPart(OUTPUTS + 1, INPUTS)], False),
        ([MappedPart(OUTPUTS, INPUTS - 1)], False),
        ([MappedPart(OUTPUTS, INPUTS)] * 2, True),
    ):
        with pytest.raises(ValueError, match=r"matrix 0 of .* is not known as such"):
            make(weights, packed, gated)
    with pytest.raises(ValueError, match=r"matrix 1 of 70 outputs is not known as such"):
        make(parts_of(bf16()), replace(packed, forms=packed.forms[:1]))
    with pytest.raises(ValueError, match="other weights for matrix 0, which lies in a file"):
        make(bf16(), packed)
    mapped, _ = program_of(SETS[0], torch.bfloat16, parts_of(bf16()), False, packed)
    assert mapped.mapped_bytes == packed.num_bytes
    weight = numbers(OUTPUTS, 1, torch.bfloat16)
    with pytest.raises(ValueError, match="the weights lie in a file"):
        library(SETS[0]).checked(
            "fill", mapped._handle, 0, weight.data_ptr(), Type.BF16, 0, OUTPUTS, 0
        )
    with pytest.raises(ValueError, match=f"has {packed.num_bytes} bytes, not 64"):
        make(parts_of(bf16()), replace(packed, num_bytes=64))
    with pytest.raises(ValueError, match="No such file"):
        make(parts_of(bf16()), replace(packed, path=packed.path.with_name("other")))


def test_a_file_that_is_too_short_is_never_read_behind(packed: WeightsFile) -> None:
    with packed.path.open("r+b") as file:
        file.truncate(packed.num_bytes // 2)
    short = replace(packed, num_bytes=packed.num_bytes // 2)
    with pytest.raises(ValueError, match="fewer weights than the program"):
        program_of(SETS[0], torch.bfloat16, parts_of(bf16()), False, short)
    packed.path.write_bytes(b"")
    with pytest.raises(ValueError, match="without weights"):
        program_of(SETS[0], torch.bfloat16, parts_of(bf16()), False, replace(packed, num_bytes=0))


def test_a_file_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    program, _ = program_of(SETS[0], torch.bfloat16, bf16(), False, None)
    with pytest.raises(ValueError, match="No such file or directory"):
        program.write_weights(tmp_path / "missing" / "weights")

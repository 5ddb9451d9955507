"""The largest logits found by a screen are those of all logits, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import DTYPES, SETS, library, pool
from torch import Tensor

from penstock.kernels import RaggedBatch
from penstock.kernels.cpu import LOGITS, BoundStep, MappedPart, NativeProgram, WeightsFile
from penstock.kernels.cpu.compiler import cpu_flags

OUTPUTS = 4100
RESTS = 64


def can_screen(name: str) -> bool:
    return name.startswith("avx512") and "avx512_vnni" in cpu_flags()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Head:
    """An output layer alone: a token's inputs are a row of ``table``."""

    def __init__(
        self, table: Tensor, weights: Tensor, name: str = SETS[0], scale: float = 1.0,
        packed: WeightsFile | None = None, threads: int = 2, bias: Tensor | None = None,
        softcap: float = 0.0,
    ) -> None:  # fmt: skip
        self.program = NativeProgram(library(name), weights.dtype, packed)
        rows = self.program.buffer(table.shape[1])
        wanted = self.program.buffer(table.shape[1], multiplied=True, outputs=True)
        self.program.embed(table, rows)
        self.program.copy(rows, wanted)
        matrix = self.program.matrix(weights if packed is None else MappedPart(*weights.shape))
        self.program.linear(
            matrix, wanted, LOGITS, bias=bias, scale=scale, softcap=softcap, screened=True
        )
        self._outputs, self._pool = len(weights), pool(name, threads)
        self._cache = self.program.bind((), ())

    def run(self, tokens: list[int], *, largest_only: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The largest of each row, their places, and logits: NaN where none was computed."""
        count = len(tokens)
        blocks = [[index] for index in range(count)]
        batch = RaggedBatch.from_lists([1] * count, [1] * count, blocks, block_size=16)
        logits = torch.full((count, self._outputs), math.nan)
        values, places = torch.empty(count), torch.empty(count, dtype=torch.int64)
        self.program.run(
            self._pool,
            BoundStep.of(
                torch.tensor(tokens), torch.arange(count), [batch], self._cache, logits,
                (values, places), largest_only=largest_only,
            ),
        )  # fmt: skip
        return values, places, logits

    def compare(self, tokens: list[int]) -> bool:
        """Whether a step was screened; what it found is what a step that computes all finds."""
        values, places, logits = self.run(tokens, largest_only=False)
        found_values, found_places, left = self.run(tokens, largest_only=True)
        assert torch.equal(found_values.isnan(), values.isnan())
        assert torch.equal(found_values.nan_to_num(), values.nan_to_num())
        assert torch.equal(found_places, places)
        computed = not left.isnan().all()
        assert not computed or torch.equal(left.nan_to_num(), logits.nan_to_num())
        return not computed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_rows_inputs_and_outputs(name: str, dtype: torch.dtype) -> None:
    for inputs, outputs in ((64, 4096), (97, 4101), (576, 4127), (5, 4100)):
        head = Head(random(40, inputs), random(outputs, inputs, seed=1).to(dtype), name)
        assert head.program.has_screen == can_screen(name)
        for rows in (1, 2, 6, 7, 12, 13, 40):
            assert head.compare(list(range(rows))) == can_screen(name)


def test_many_inputs_become_two_bytes_where_that_pays() -> None:
    """More products of bytes than of bf16's pairs would take as long."""
    table, weights = random(8, 1600), random(OUTPUTS, 1600, seed=1)
    for dtype, few, many in ((torch.float32, True, True), (torch.bfloat16, True, False)):
        head = Head(table, weights.to(dtype))
        if not head.program.has_screen:
            pytest.skip("no screen on this CPU")
        has_dot = "avx512_bf16" in cpu_flags()
        assert head.compare(list(range(6))) == few
        assert head.compare(list(range(8))) == (many or not has_dot)


def test_floats_that_lie_in_16_bits() -> None:
    weights = random(OUTPUTS, 96, seed=1).bfloat16().float()
    head = Head(random(16, 96), weights)
    assert head.compare(list(range(16))) == can_screen(SETS[0])


def test_of_equal_logits_the_first_is_found() -> None:
    weights, table = random(OUTPUTS, 64, seed=1), random(9, 64)
    best = int((table[0] @ weights.T).argmax())
    for place in (4099, 3000, 7):
        weights[place] = weights[best]
    head = Head(table, weights)
    assert head.compare(list(range(9))) == can_screen(SETS[0])
    assert head.run([0], largest_only=True)[1].tolist() == [min(best, 7)]


@pytest.mark.parametrize("scale", [0.125, 37.0])
def test_scaled_logits(scale: float) -> None:
    head = Head(random(5, 64), random(OUTPUTS, 64, seed=1), scale=scale)
    assert head.compare(list(range(5))) == can_screen(SETS[0])


ODD_WEIGHTS: dict[str, Callable[[Tensor], None]] = {
    "nan": lambda w: w[[100, 3000], 3].fill_(math.nan),
    "infinite": lambda w: w[[50, 2000], 0].copy_(torch.tensor([math.inf, -math.inf])),
    "huge": lambda w: w[70].mul_(1e25),
    "overflowing": lambda w: w[70].fill_(3e38),
    "tiny": lambda w: w.mul_(1e-25),
    "below all normal numbers": lambda w: w.mul_(1e-38),
    "ever larger": lambda w: w.copy_(torch.linspace(0, 1, OUTPUTS).unsqueeze(1)),
    "zeros": lambda w: w[::2].zero_(),
    "all zeros": lambda w: w.zero_(),
    "all equal": lambda w: w.fill_(0.5),
    "outliers": lambda w: w[:, 5].mul_(50),
}


@pytest.mark.parametrize("odd", ODD_WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_weights(odd: str, dtype: torch.dtype) -> None:
    weights = random(OUTPUTS, 64, seed=1)
    ODD_WEIGHTS[odd](weights)
    head = Head(random(15, 64), weights.to(dtype))
    for rows in (3, 15):
        head.compare(list(range(rows)))


ODD_ROWS: dict[str, Callable[[Tensor], None]] = {
    "nan": lambda x: x[2, 3].fill_(math.nan),
    "infinite": lambda x: x[2, 3].fill_(-math.inf),
    "huge": lambda x: x[2].mul_(1e30),
    "tiny": lambda x: x[2].mul_(1e-30),
    "zeros": lambda x: x[2].zero_(),
}


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_a_step_with_an_odd_row_computes_all(odd: str) -> None:
    table = random(15, 64)
    ODD_ROWS[odd](table)
    for rows in (3, 15):
        head = Head(table, random(OUTPUTS, 64, seed=1))
        assert not head.compare(list(range(rows)))


def test_a_step_that_gives_up_is_followed_by_some_that_do_not_try() -> None:
    table = random(4, 64)
    table[0] = 0.0  # whose logits are all equal
    head = Head(table, random(OUTPUTS, 64, seed=1))
    if not head.program.has_screen:
        pytest.skip("no screen on this CPU")
    assert head.compare([1])
    assert not head.compare([0])
    for _ in range(RESTS):
        assert not head.run([1], largest_only=True)[2].isnan().any()
    assert head.run([1], largest_only=True)[2].isnan().all()


@pytest.mark.parametrize(
    ("outputs", "options"),
    [
        (4095, {}),
        (OUTPUTS, {"bias": torch.ones(OUTPUTS)}),
        (OUTPUTS, {"softcap": 30.0}),
        (OUTPUTS, {"scale": -1.0}),
    ],
)
def test_there_is_none_for(outputs: int, options: dict[str, Any]) -> None:
    head = Head(random(3, 64), random(outputs, 64, seed=1), **options)
    assert not head.program.has_screen
    assert not head.compare([0, 1, 2])


def test_only_the_largest_without_a_place_for_them() -> None:
    head = Head(random(3, 64), random(OUTPUTS, 64, seed=1))
    batch = RaggedBatch.from_lists([1], [1], [[0]], block_size=16)
    token = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="no memory for the largest"):
        head.program.run(
            pool(),
            BoundStep.of(
                token, token, [batch], head.program.bind((), ()), torch.empty(1, OUTPUTS),
                largest_only=True,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_lies_in_the_file_of_packed_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    table, weights = random(9, 80), random(OUTPUTS, 80, seed=1).to(dtype)
    made = Head(table, weights)
    expected = made.run(list(range(9)), largest_only=True)
    file = made.program.write_weights(tmp_path / "weights")
    more = file.num_bytes - made.program.weight_bytes
    assert more >= OUTPUTS * 80 if made.program.has_screen else more == 0
    mapped = Head(table, weights, packed=file)
    assert mapped.compare(list(range(9))) == can_screen(SETS[0])
    found = mapped.run(list(range(9)), largest_only=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    if made.program.has_screen:
        file.path.write_bytes(file.path.read_bytes()[:-4096])
        with pytest.raises(ValueError, match="fewer weights"):
            Head(table, weights, packed=replace(file, num_bytes=file.num_bytes - 4096))


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 30),
    inputs=st.integers(1, 300),
    tail=st.sampled_from([0.0, 1.0, 3.0]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=40, deadline=None)
def test_any_numbers(
    seed: int, rows: int, inputs: int, tail: float, dtype: torch.dtype, threads: int
) -> None:
    """With a heavy tail few inputs and weights are much larger than all others."""
    table, weights = random(rows, inputs, seed=seed), random(OUTPUTS, inputs, seed=seed + 1)
    table *= random(rows, inputs, seed=seed + 2).abs() ** tail
    weights *= random(OUTPUTS, inputs, seed=seed + 3).abs() ** tail
    Head(table, weights.to(dtype), threads=threads).compare(list(range(rows)))

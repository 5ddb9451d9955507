"""The largest number of each row, against torch, on every instruction set of this machine."""

from __future__ import annotations

import math

import pytest
import torch
from native_programs import SETS, library, linear, pool

from penstock.kernels import RaggedBatch
from penstock.kernels.cpu import LOGITS, BoundStep, NativeProgram

ODD = {
    "numbers": [],
    "ties": [(slice(None), 0.0)],
    "nan": [(3, math.nan), (7, math.nan)],
    "infinite": [(2, math.inf), (9, math.inf)],
    "infinite and nan": [(2, math.inf), (9, math.nan)],
    "nothing": [(slice(None), -math.inf)],
    "masked": [(slice(0, 5), -math.inf)],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", SETS)
def test_value_and_first_place(name: str, odd: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 10), (3, 16), (2, 17), (5, 1000), (40, 33)):
        x = torch.randn(rows, columns, generator=generator)
        for place, value in ODD[odd]:
            x[0, place] = value
        values, places = pool(name).largest(x)
        expected = x.max(-1).values
        assert torch.equal(values.isnan(), expected.isnan())
        assert torch.equal(values.nan_to_num(0.0), expected.nan_to_num(0.0))
        for row, place in zip(x, places.tolist(), strict=True):
            best = row.isnan() if row.isnan().any() else row == row.max()
            assert place == int(best.nonzero()[0])


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", SETS)
def test_of_logits_while_they_are_computed(name: str, odd: str) -> None:
    """The helper compares them; here with ties and odd numbers in several parts of a row."""
    outputs, inputs = 1100, 16
    weights = torch.zeros(outputs, inputs)
    weights[:, 0] = torch.randn(outputs, generator=torch.Generator().manual_seed(1))
    for place, value in ODD[odd]:
        for part in (0, 30, 800) if isinstance(place, int) else (0,):
            weights[part + place if isinstance(place, int) else place, 0] = value
    rows = torch.zeros(19, inputs)
    rows[:, 0] = torch.linspace(0.5, 3.0, 19)
    found = linear(name, rows, weights)
    assert found.isnan().any() == weights.isnan().any()


def test_values_without_places_are_refused() -> None:
    program = NativeProgram(library(), torch.float32)
    rows, wanted = program.buffer(8), program.buffer(8, multiplied=True, outputs=True)
    program.embed(torch.zeros(3, 8), rows)
    program.copy(rows, wanted)
    program.linear(program.matrix(torch.zeros(4, 8)), wanted, LOGITS)
    batch = RaggedBatch.from_lists([1], [1], [[0]], block_size=16)
    token, cache = torch.zeros(1, dtype=torch.int64), program.bind((), ())
    with pytest.raises(ValueError, match="no places"):
        program.run(
            pool(SETS[0]),
            BoundStep.of(
                token, token, [batch], cache, torch.empty(1, 4),
                (torch.empty(1), torch.empty(0, dtype=torch.int64)),
            ),
        )  # fmt: skip


def test_rows_apart_and_no_rows() -> None:
    x = torch.arange(60.0).view(4, 15)
    assert pool(SETS[0]).largest(x[:, 3:9])[1].tolist() == [5] * 4
    assert pool(SETS[0]).largest(x[:0])[1].tolist() == []


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        pool(SETS[0]).largest(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="cannot be"):
        pool(SETS[0]).largest(torch.zeros(2, 0))

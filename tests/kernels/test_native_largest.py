"""The largest number of each row, against torch, on every instruction set of this machine."""

from __future__ import annotations

import math

import pytest
import torch
from native_programs import SETS, pool

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


def test_rows_apart_and_no_rows() -> None:
    x = torch.arange(60.0).view(4, 15)
    assert pool(SETS[0]).largest(x[:, 3:9])[1].tolist() == [5] * 4
    assert pool(SETS[0]).largest(x[:0])[1].tolist() == []


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        pool(SETS[0]).largest(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="cannot be"):
        pool(SETS[0]).largest(torch.zeros(2, 0))

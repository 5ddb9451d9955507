"""Log-probabilities of the native library, against PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from native_programs import SETS, pool

from penstock.gpu_worker.model.sampling.row_operations import TorchRows


@pytest.mark.parametrize("width", [0, 1, 5, 9])
@pytest.mark.parametrize("columns", [9, 16, 33, 3000])
@pytest.mark.parametrize("name", SETS)
def test_figures_are_pytorchs(name: str, columns: int, width: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    for distinct in (3, 10**6):  # many that tie, and none
        logits = torch.randint(distinct, (7, columns), generator=generator) * (20 / distinct)
        logits[2, 3:6] = -math.inf
        rows = torch.tensor([6, 0, 2, 2, 5])
        tokens = torch.randint(columns, (5,), generator=generator)
        tokens[2] = 4  # of probability 0
        found = pool(name).logprobs(logits, logits.max(-1).values, rows, tokens, width)
        chosen, values, _ = TorchRows().logprobs(logits, rows, tokens, width)
        torch.testing.assert_close(found[0], chosen, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[1], values, rtol=1e-6, atol=1e-6)
        ranked = logits[rows].sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(found[2], ranked[:, :width])  # of equals the lowest id first
        exact = logits.double().log_softmax(-1)[rows]
        exact = exact.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
        torch.testing.assert_close(found[0], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SETS)
def test_a_row_depends_on_itself_alone(name: str) -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1)) * 4
    logits[1, 3], logits[3, 4] = math.nan, math.inf
    highest, rows, tokens = logits.max(-1).values, torch.arange(6), torch.arange(6)
    together = pool(name).logprobs(logits, highest, rows, tokens, 4)
    for row in (0, 2, 4, 5):
        part = slice(row, row + 1)
        alone = pool(name, 1).logprobs(logits, highest, rows[part], tokens[part], 4)
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[0], theirs[row])


def test_what_it_cannot_read_is_refused() -> None:
    logits, one = torch.zeros(2, 3), torch.ones(1, dtype=torch.int64)
    for rows, tokens, width in (
        (2 * one, one, 1),
        (one, 3 * one, 1),
        (one, -one, 1),
        (one, one, 4),
    ):
        with pytest.raises(ValueError, match=r"not there|than there are"):
            pool(SETS[0]).logprobs(logits, torch.zeros(2), rows, tokens, width)

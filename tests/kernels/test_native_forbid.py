"""Forbidden tokens, against PyTorch, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from native_programs import SETS, pool

from penstock.gpu_worker.model.sampling.row_operations import TorchRows


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("name", SETS)
def test_forbidden_tokens_are_pytorchs(name: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(6, columns + 5, generator=generator)
    rows = torch.tensor([4, 0, 5])
    words = columns // 32 + 2  # one more than there are tokens for
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    masks[0, ::2], masks[1] = 0, -1
    found, expected = logits.clone(), logits.clone()
    pool(name).forbid(found[:, :columns], rows, masks)
    TorchRows().forbid(expected[:, :columns], rows, masks)
    assert torch.equal(found, expected)
    assert torch.equal(found[[1, 2, 3]], logits[[1, 2, 3]])
    assert torch.equal(found[:, columns:], logits[:, columns:])


def test_what_does_not_fit_is_refused() -> None:
    logits, rows = torch.zeros(2, 40), torch.tensor([0, 1])
    for shape, dtype in (((2, 1), torch.int32), ((1, 2), torch.int32), ((2, 2), torch.int64)):
        with pytest.raises(ValueError, match="masks of"):
            pool(SETS[0]).forbid(logits, rows, torch.zeros(shape, dtype=dtype))
    with pytest.raises(ValueError, match="not there"):
        pool(SETS[0]).forbid(logits, rows + 1, torch.zeros(2, 2, dtype=torch.int32))

"""Finding the largest of many logits."""

from __future__ import annotations

import pytest
import torch

from penstock.gpu_worker.model.sampling import gumbel_sampling


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 300, 4096, 4096 + 37])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_the_largest_is_found_where_max_finds_it(monkeypatch, rows, vocab_size):
    monkeypatch.setattr(gumbel_sampling, "_FEW_LOGITS", 0)
    generator = torch.Generator().manual_seed(vocab_size + rows)
    for values in (2, 30, 10**6):  # from nearly all equal to nearly none
        shape = (rows, vocab_size)
        logits = torch.randint(values, shape, generator=generator).float() - values
        logits[rows - 1, vocab_size // 2] = float("nan")
        if rows > 1:
            logits[0] = float("-inf")
            logits[1, vocab_size - 1] = 7.0
        found, expected = gumbel_sampling.largest(logits), logits.max(dim=-1)
        torch.testing.assert_close(found[0], expected.values, equal_nan=True, rtol=0, atol=0)
        assert found[1].tolist() == expected.indices.tolist()

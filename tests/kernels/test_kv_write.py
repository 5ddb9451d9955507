"""Keys and values land in their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch
from kernels_reference import make_batch

from penstock.kernels import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [(3, 8, 8), (1, 24, 16), (2, 5, 7)])
def test_exactly_its_slots(dims, dtype):
    heads, key_dim, value_dim = dims
    batch, tables = make_batch([1, 9, 4], [8, 9, 15], 5)
    blocks = sum(map(len, tables)) + 3
    # The strides of a model's projections: [heads, tokens, dim] seen as [tokens, heads, dim].
    key = torch.randn(heads, 14, key_dim).to(dtype).transpose(0, 1)
    value = torch.randn(heads, 14, value_dim).to(dtype).transpose(0, 1)
    key_cache = torch.full((blocks, 5, heads, key_dim), float("nan"), dtype=dtype)
    value_cache = torch.full((blocks, 5, heads, value_dim), float("nan"), dtype=dtype)

    write_kv(key, value, key_cache, value_cache, batch.slots, block_size=5)

    written = set()
    positions = [(0, 7), *((1, p) for p in range(9)), *((2, p) for p in range(11, 15))]
    for row, (sequence, position) in enumerate(positions):
        block, offset = tables[sequence][position // 5], position % 5
        assert torch.equal(key_cache[block, offset], key[row])
        assert torch.equal(value_cache[block, offset], value[row])
        written.add((block, offset))
    for block in range(blocks):
        for offset in range(5):
            if (block, offset) not in written:
                assert key_cache[block, offset].isnan().all()
                assert value_cache[block, offset].isnan().all()


def test_overwrites_what_a_rejected_draft_left():
    cache = torch.zeros(2, 4, 1, 2)
    slots = torch.tensor([5, 6])
    write_kv(torch.ones(2, 1, 2), torch.ones(2, 1, 2), cache, cache.clone(), slots, block_size=4)
    write_kv(
        torch.full((2, 1, 2), 3.0), torch.ones(2, 1, 2), cache, cache.clone(), slots, block_size=4
    )
    assert cache.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 0, 0, 3, 3, 0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (torch.zeros(3, 2, 8), torch.zeros(2, 2, 8), r"key is \[3, 2, 8\]"),
        (torch.zeros(2, 1, 8), torch.zeros(2, 2, 8), r"key is \[2, 1, 8\]"),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2, 4), r"value is \[2, 2, 4\]"),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2, 8).half(), "value is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(key, value, message):
    cache = torch.zeros(4, 4, 2, 8)
    with pytest.raises(ValueError, match=message):
        write_kv(key, value, cache, cache.clone(), torch.tensor([0, 1]), block_size=4)


def test_a_strided_cache_is_refused():
    cache = torch.zeros(4, 4, 8, 2).transpose(2, 3)
    states = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="must be contiguous"):
        write_kv(states, states, cache, cache, torch.tensor([0]), block_size=4)

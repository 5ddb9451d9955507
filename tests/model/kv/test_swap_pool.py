"""Blocks that go to the host and come back, of layers that differ, share, and store MLA's sizes."""

from __future__ import annotations

import pytest
import torch

from penstock.gpu_worker.engine.plan import BlockCopy
from penstock.gpu_worker.model.kv import memory_budget as memory
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.memory_budget import swap_budget
from penstock.gpu_worker.model.kv.swap_pool import SwapPool
from penstock.gpu_worker.model.loading.geometry import KVGeometry, LayerGeometry
from penstock.shared.errors import InsufficientMemory

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
GEOMETRY = KVGeometry(
    (
        LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=6, value_dim=4, window=5),
        LayerGeometry(num_query_heads=4, num_kv_heads=1, key_dim=24, value_dim=20),
        LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=6, value_dim=4, shares=0),
    )
)


def filled(device: str, num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(GEOMETRY, num_blocks, 3, torch.device(device), dtype)
    for layer in pool.layers:
        for tensor in (layer.key, layer.value) if layer.writes else ():
            tensor.copy_(torch.rand(tensor.shape))
    return pool


def content(pool: KVPool) -> list[torch.Tensor]:
    return [t.clone() for layer in pool.layers if layer.writes for t in (layer.key, layer.value)]


def erase(pool: KVPool) -> None:
    for layer in pool.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_is_what_went_out(device: str, dtype: torch.dtype) -> None:
    pool = filled(device, dtype=dtype)
    host = SwapPool(pool, [5])
    before = content(pool)
    host.swap([BlockCopy(7, 0), BlockCopy(2, 4), BlockCopy(3, 1)], [])
    erase(pool)  # as a forward does that is given these blocks
    host.swap([], [BlockCopy(4, 5), BlockCopy(0, 0)])
    host.swap([], [BlockCopy(1, 6)])
    for found, expected in zip(content(pool), before, strict=True):
        for block, source in {5: 2, 0: 7, 6: 3}.items():
            assert torch.equal(found[block], expected[source])
        assert found[1].isnan().all(), "and nothing else was written"


@pytest.mark.parametrize("device", DEVICES)
def test_out_comes_before_in(device: str) -> None:
    """One plan may swap a block out, and give its place, or even its host block, at once."""
    pool = filled(device)
    host = SwapPool(pool, [2])
    before = content(pool)
    host.swap([BlockCopy(1, 0)], [])
    host.swap([BlockCopy(2, 1)], [BlockCopy(0, 2), BlockCopy(1, 3)])
    for found, expected in zip(content(pool), before, strict=True):
        assert torch.equal(found[2], expected[1])
        assert torch.equal(found[3], expected[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_blocks_than_the_staging_buffers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled("cuda", num_blocks=300)
    monkeypatch.setattr(
        "penstock.gpu_worker.model.kv.swap_pool._STAGE_BYTES", 4 * pool.bytes_per_block
    )
    host = SwapPool(pool, [300])
    before = content(pool)
    everything = [BlockCopy(block, 299 - block) for block in range(300)]
    for _ in range(3):
        host.swap(everything, [])
        erase(pool)
        host.swap([], [BlockCopy(copy.target, copy.source) for copy in everything])
    torch.cuda.synchronize()
    assert all(map(torch.equal, content(pool), before))


def test_seconds_are_told_once_and_only_of_swaps() -> None:
    pool = filled("cpu")
    host = SwapPool(pool, [2])
    host.swap([], [])
    assert host.take_seconds() is None
    host.swap([BlockCopy(0, 0)], [])
    seconds = host.take_seconds()
    assert seconds is not None
    assert 0 < seconds < 60
    assert host.take_seconds() is None


def test_memory_the_host_cannot_give() -> None:
    with pytest.raises(InsufficientMemory, match=r"host cannot give .*lower engine\.swap_memory"):
        SwapPool(filled("cpu"), [1 << 50])


def test_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 16 << 30)
    cuda = torch.device("cuda")
    assert swap_budget(None, 3 << 20, CPU) == 3 << 20
    assert swap_budget(None, 64 << 30, CPU) == 2 << 30
    assert swap_budget(None, 3 << 20, cuda) == 2 << 20
    assert swap_budget(0, 3 << 20, cuda) == 0
    assert swap_budget(5 << 20, 3 << 20, CPU) == 5 << 20
    assert swap_budget(5 << 20, 3 << 20, cuda) == 4 << 20
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 40)
    assert swap_budget(None, 64 << 30, CPU) == 4 << 30
    with pytest.raises(InsufficientMemory, match=r"engine\.swap_memory is 2\.0 TiB, more than"):
        swap_budget(2 << 40, 0, CPU)

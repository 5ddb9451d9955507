"""The KV pool's size, its block copies, and the memory budget it is made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.gpu_worker.engine.plan import BlockCopy
from penstock.gpu_worker.model.kv import memory_budget as memory
from penstock.gpu_worker.model.kv.kv_pool import KVPool, blocks_in_budget
from penstock.gpu_worker.model.kv.memory_budget import kv_budget
from penstock.gpu_worker.model.loading.geometry import KVGeometry, LayerGeometry
from penstock.shared.errors import ConfigurationError, InsufficientMemory

CPU = torch.device("cpu")
FULL = LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=6, value_dim=4)
SHARED = LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=6, value_dim=4, shares=0)
WIDE = LayerGeometry(num_query_heads=4, num_kv_heads=1, key_dim=8, value_dim=8)
GEOMETRY = KVGeometry((FULL, WIDE, SHARED))
PER_TOKEN = 2 * (6 + 4) + 1 * (8 + 8)


def filled_pool(num_blocks: int = 6, block_size: int = 3) -> KVPool:
    pool = KVPool(GEOMETRY, num_blocks, block_size, CPU, torch.float32)
    for index, layer in enumerate(pool.layers):
        for tensor in (layer.key, layer.value) if layer.writes else ():
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(index)))
    return pool


def test_shapes_and_bytes() -> None:
    pool = KVPool(GEOMETRY, 6, 3, CPU, torch.bfloat16)
    assert [tuple(layer.key.shape) for layer in pool.layers[:2]] == [(6, 3, 2, 6), (6, 3, 1, 8)]
    assert [tuple(layer.value.shape) for layer in pool.layers[:2]] == [(6, 3, 2, 4), (6, 3, 1, 8)]
    assert pool.bytes_per_block == GEOMETRY.block_bytes(3, torch.bfloat16) == PER_TOKEN * 3 * 2
    tensors = [t for layer in pool.layers if layer.writes for t in (layer.key, layer.value)]
    assert pool.num_bytes == sum(tensor.nbytes for tensor in tensors)


def test_a_layer_that_shares_has_no_memory_of_its_own() -> None:
    pool = KVPool(GEOMETRY, 6, 3, CPU, torch.float32)
    assert pool.layers[2].key is pool.layers[0].key
    assert pool.layers[2].value is pool.layers[0].value
    assert [layer.writes for layer in pool.layers] == [True, True, False]


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 5)],
        [(1, 4), (1, 3), (2, 0)],
        # A block that was read may be written by a later copy: all are read first.
        [(1, 4), (2, 1)],
    ],
)
def test_copies_read_all_before_they_write(pairs: list[tuple[int, int]]) -> None:
    pool = filled_pool()
    before = [(layer.key.clone(), layer.value.clone()) for layer in pool.layers]
    pool.copy_blocks([BlockCopy(*pair) for pair in pairs])
    source_of = {target: source for source, target in pairs}
    for layer, (key, value) in zip(pool.layers, before, strict=True):
        for block in range(pool.num_blocks):
            assert torch.equal(layer.key[block], key[source_of.get(block, block)])
            assert torch.equal(layer.value[block], value[source_of.get(block, block)])


def test_no_copies_change_nothing() -> None:
    pool = filled_pool()
    before = pool.layers[0].key.clone()
    pool.copy_blocks(())
    assert torch.equal(pool.layers[0].key, before)


def test_blocks_in_budget() -> None:
    block = PER_TOKEN * 16 * 4
    assert blocks_in_budget(GEOMETRY, 16, torch.float32, block) == 1
    assert blocks_in_budget(GEOMETRY, 16, torch.float32, 10 * block - 1) == 9
    assert blocks_in_budget(GEOMETRY, 16, torch.bfloat16, 10 * block) == 20


def test_a_budget_below_one_block_says_both_sizes() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        blocks_in_budget(GEOMETRY, 16, torch.float32, 1024)
    assert str(caught.value) == (
        "engine.kv_memory: a budget of 1.0 KiB holds no block of 16 tokens, which takes 2304 bytes "
        "(2.2 KiB) in this model; set it to at least as many blocks as the sequences that run at "
        "the same time need, or lower engine.block_size"
    )
    with pytest.raises(InsufficientMemory, match=r"a budget of 1 B .* this model and its draft"):
        blocks_in_budget(GEOMETRY, 16, torch.float32, 1, GEOMETRY)


def test_a_pool_the_machine_cannot_give() -> None:
    with pytest.raises(InsufficientMemory, match=r"cpu cannot give .* lower engine.kv_memory"):
        KVPool(GEOMETRY, 1 << 45, 16, CPU, torch.float32)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("64KiB", 64 << 10),
        ("1048576", 1 << 20),
        (4096, 4096),
    ],
)
def test_sizes(setting: str | int, expected: int) -> None:
    assert memory.parse_bytes(setting) == expected


@pytest.mark.parametrize("setting", ["", "MiB", "-1GiB", "0", "12 parsecs", "1e9", 0, "0.2B"])
def test_what_is_no_size(setting: str | int) -> None:
    with pytest.raises(ConfigurationError, match=r"memory size: got .* allowed: a positive"):
        memory.parse_bytes(setting)


@pytest.mark.parametrize(
    ("size", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert memory.format_bytes(size) == text


def test_the_default_budget_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 << 30)
    assert kv_budget(None, CPU) == 512 << 20
    monkeypatch.setattr(memory, "available_bytes", lambda device: 64 << 30)
    assert kv_budget(None, CPU) == 1 << 30


def test_a_budget_beyond_the_machine_says_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 << 30)
    assert kv_budget("1GiB", CPU) == 1 << 30
    with pytest.raises(
        InsufficientMemory, match=r"engine\.kv_memory is 3\.0 GiB, more than cpu has .*2\.0 GiB"
    ):
        kv_budget("3GiB", CPU)


def test_available_memory_is_what_this_machine_has() -> None:
    available = memory.available_bytes(CPU)
    text = Path("/proc/meminfo").read_text()
    total = int(text.split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < available <= total

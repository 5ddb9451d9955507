"""KV geometry as the probe forward sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model.families import WINDOW

from penstock.gpu_worker.model.loading.geometry import KVGeometry, LayerGeometry
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.kernels.kv_layout import KVLayout

Loaded = Callable[[str], LoadedModel]

PLAIN = LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=16, value_dim=16)


def test_grouped_query_attention(loaded: Loaded) -> None:
    assert loaded("llama").geometry.layers == (PLAIN,) * 3
    assert loaded("llama").geometry.block_bytes(16, torch.float32) == 4 * 16 * 3 * 2 * (16 + 16)
    assert loaded("llama").geometry.windows == ()


def test_head_size_of_its_own(loaded: Loaded) -> None:
    layer = loaded("qwen3").geometry.layers[0]
    assert (layer.key_dim, layer.value_dim) == (24, 24)


def test_multi_head_latent_attention_has_unequal_sizes(loaded: Loaded) -> None:
    layer = loaded("deepseek_v3").geometry.layers[0]
    assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (4, 16 + 8, 20)


def test_window_softcap_and_sinks_by_layer(loaded: Loaded) -> None:
    gemma2, gpt_oss = loaded("gemma2").geometry, loaded("gpt_oss").geometry
    assert [layer.window for layer in gemma2.layers] == [WINDOW, None, WINDOW]
    assert gemma2.windows == (WINDOW,)
    assert {layer.softcap for layer in gemma2.layers} == {2.0}
    assert [layer.window for layer in gpt_oss.layers] == [WINDOW, None, WINDOW]
    assert all(layer.sinks for layer in gpt_oss.layers)
    assert not any(layer.sinks for layer in gemma2.layers)


def test_layers_that_reuse_kv_store_none(loaded: Loaded) -> None:
    """Gemma 3n: the last two of six layers read what the last of their kind before stored."""
    geometry = loaded("gemma3n_text").geometry
    assert [layer.shares for layer in geometry.layers] == [None, None, None, None, 2, 3]
    assert geometry.block_bytes(8, torch.bfloat16) == 2 * 8 * 4 * 2 * (16 + 16)


def test_layers_of_different_sizes(loaded: Loaded) -> None:
    """Gemma 4: full layers have larger heads than sliding ones."""
    geometry = loaded("gemma4_text").geometry
    assert {layer.key_dim for layer in geometry.layers if layer.window} == {16}
    assert {layer.key_dim for layer in geometry.layers if not layer.window} == {32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_are_independent_of_the_dtype(
    checkpoint: Callable[[str], Path], dtype: torch.dtype
) -> None:
    model = load_model(checkpoint("llama"), device="cpu", dtype=str(dtype).removeprefix("torch."))
    assert model.geometry == KVGeometry((PLAIN,) * 3, KVLayout.GROUPS)

"""What a GGUF file says of positions, windows and scales is honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model.checkpoints import test_gguf
from model.checkpoints.greedy_tokens import expected_greedy, greedy
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.gpu_worker.model.checkpoints.gguf_file import GGUFSource
from penstock.gpu_worker.model.checkpoints.gguf_settings import ARCHITECTURES
from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
from penstock.gpu_worker.model.loading.checkpoint import load_config
from penstock.gpu_worker.model.loading.load_gate import context_limit
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.shared.errors import ModelError, UnsupportedModel

HIDDEN, HEADS, WIDTH = 64, 4, 16


def header(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    layers: int = 2,
) -> Path:
    """A file of settings, and of tensors that are no weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(64)
    for key, value in settings.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{architecture}.{key}", value)
    for name, values in {"none": np.ones(1, np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(factor: float, width: int, theta: float) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors = []
    for place in range(0, width, 2):
        length = 2 * np.pi * theta ** (place / width)
        if length < 8192 / 4:
            factors.append(1.0)
        elif length > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / length - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def rope_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load_config(path).rope_parameters
    return found


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_frequencies_are_scaled(factor: float, tmp_path: Path) -> None:
    factors = llama3_factors(factor, WIDTH, 500000.0)
    assert len(set(factors.tolist())) > 2  # some are between the ends
    settings = {"rope.dimension_count": WIDTH}
    file = header(tmp_path / "a.gguf", "llama", settings, {"rope_freqs.weight": factors})
    config = load_config(file)
    assert config.rope_parameters["rope_type"] == "llama3"
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    assert torch.allclose(found * torch.from_numpy(factors), plain)


def test_a_llama_3_file_gives_the_tokens_of_its_model(tmp_path: Path) -> None:
    width = test_gguf.HIDDEN // test_gguf.HEADS
    file, plain = tmp_path / "tiny.gguf", tmp_path / "plain.gguf"
    factors = llama3_factors(8.0, width, 10000.0)
    settings = {"rope_freqs.weight": factors}
    test_gguf.save_dense(
        tmp_path / "dense", file, test_gguf.write(file, "Q8_0", tied=True, settings=settings)
    )
    test_gguf.write(plain, "Q8_0", tied=True)
    # The folder's configuration is written by hand: transformers reads none of it from the file.
    config = load_config(file)
    assert config.rope_parameters["factor"] == 8.0
    config.save_pretrained(tmp_path / "dense")
    loaded = load_model(file, device="cpu")
    try:
        assert greedy(loaded) == expected_greedy(tmp_path / "dense")
    finally:
        loaded.close()


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(WIDTH // 2, np.float32)}
    assert rope_of(header(tmp_path / "a.gguf", "llama", {}, ones))["rope_type"] == "default"


def test_scaled_positions_reach_the_configuration(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    found = rope_of(header(tmp_path / "a.gguf", "llama", linear))
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("linear", 4.0, 500000.0)
    without_type = {"rope.scaling.factor": 4.0}
    assert rope_of(header(tmp_path / "b.gguf", "qwen3", without_type))["rope_type"] == "linear"
    yarn = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32768, "rope.scaling.yarn_beta_fast": 16.0,
    }  # fmt: skip
    found = rope_of(header(tmp_path / "c.gguf", "qwen2", yarn))
    assert found == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "beta_fast": 16.0, "rope_theta": 500000.0,
    }  # fmt: skip
    gemma = rope_of(header(tmp_path / "d.gguf", "gemma3", linear | {"attention.key_length": WIDTH}))
    assert gemma["full_attention"]["rope_type"] == "linear"
    assert gemma["full_attention"]["factor"] == 4.0
    assert gemma["sliding_attention"]["rope_type"] == "default"
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    assert rope_of(header(tmp_path / "e.gguf", "qwen2", none))["rope_type"] == "default"


def test_phi_3_has_its_long_factors_its_window_and_its_turned_part(tmp_path: Path) -> None:
    turned = 12
    short = np.linspace(1, 2, turned // 2, dtype=np.float32)
    settings = {
        "rope.dimension_count": turned, "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": 1.25, "attention.sliding_window": 2047,
    }  # fmt: skip
    tensors = {"rope_factors_long.weight": 4 * short, "rope_factors_short.weight": short}
    config = load_config(header(tmp_path / "a.gguf", "phi3", settings, tensors))
    assert config.sliding_window == 2047
    assert context_limit(config) == 4096
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["partial_rotary_factor"]) == ("longrope", turned / WIDTH)
    found, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, turned, 2) / turned)
    assert torch.allclose(found * torch.from_numpy(short), plain)
    assert factor == 1.25


def test_gemma_has_its_scale_and_its_caps(tmp_path: Path) -> None:
    settings = {"attention.key_length": 32, "attn_logit_softcapping": 40.0}
    small = load_config(header(tmp_path / "a.gguf", "gemma2", settings))
    assert (small.query_pre_attn_scalar, small.attn_logit_softcapping) == (32, 40.0)
    large = load_config(header(tmp_path / "b.gguf", "gemma2", settings, layers=46))
    assert large.query_pre_attn_scalar == HIDDEN // HEADS


ODD = {"rope_freqs.weight": np.linspace(1, 3, WIDTH // 2, dtype=np.float32)}
LONG = {"rope_factors_long.weight": np.ones(WIDTH // 2, np.float32)}


@pytest.mark.parametrize(
    ("architecture", "settings", "tensors", "named"),
    [
        ("llama", {}, ODD, r"the factors in rope_freqs\.weight are not those"),
        ("llama", {}, LONG, r"it has rope_factors_long\.weight"),
        ("phi3", {}, LONG, r"both together with phi3\.rope\.scaling\.original_context_length"),
        ("llama", {"rope.scaling.type": "longrope"}, {}, r"scaling\.type is 'longrope'"),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "without rope"),
        ("qwen2", {"rope.dimension_count": 8}, {}, r"qwen2\.rope\.dimension_count is 8"),
        ("llama", {"rope.scale_linear": 4.0}, {}, r"llama\.rope\.scale_linear is 4\.0"),
        ("llama", {"attention.scale": 0.5}, {}, r"llama\.attention\.scale is 0\.5"),
        ("qwen2", {"attention.sliding_window": 512}, {}, r"attention\.sliding_window is 512"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(
    architecture: str, settings: dict[str, Any], tensors: Any, named: str, tmp_path: Path
) -> None:
    file = header(tmp_path / "a.gguf", architecture, settings, tensors)
    with pytest.raises(UnsupportedModel, match=named) as refused:
        load_config(file)
    assert "use the model's own checkpoint" in str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "key", "named"),
    [
        ("llama", "rope.scaling.factor", r"llama\.rope\.scaling\.factor is 'x', and no number"),
        ("phi3", "attention.sliding_window", r"sliding_window is 'x', and no number"),
        ("gemma2", "attn_logit_softcapping", r"softcapping is 'x', and no number"),
    ],
)
def test_a_setting_of_another_type_is_named(
    architecture: str, key: str, named: str, tmp_path: Path
) -> None:
    file = header(tmp_path / "a.gguf", architecture, {key: "x"})
    with pytest.raises(ModelError, match=named):
        load_config(file)


def test_an_architecture_that_gguf_does_not_have_is_refused(tmp_path: Path) -> None:
    """llama.cpp's converter writes Mistral's models as llama."""
    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())
    file = header(tmp_path / "a.gguf", "mistral", {})
    with pytest.raises(UnsupportedModel, match=r"has the architecture 'mistral'; served from GGUF"):
        plan_memory(file)


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    bias = {"blk.0.attn_q.bias": np.ones(test_gguf.HIDDEN, np.float32)}
    test_gguf.write(file, "Q8_0", tied=True, settings=bias)
    with pytest.raises(UnsupportedModel, match=r"1 tensors .*\(blk\.0\.attn_q\.bias\)"):
        GGUFSource(file, load_config(file))

"""Models in GGUF files give, token by token, what gguf's own dequantisation gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model.checkpoints.greedy_tokens import expected_greedy, greedy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from penstock.gpu_worker.model.checkpoints.gguf_file import GGUFSource
from penstock.gpu_worker.model.loading.checkpoint import load_config
from penstock.gpu_worker.model.loading.fingerprint import fingerprint_of
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.quantization.formats.gguf_blocks import BLOCKS, repack
from penstock.gpu_worker.model.quantization.formats.quantized_source import SourceBytes
from penstock.gpu_worker.model.quantization.quantized_modules import (
    QuantizedEmbedding,
    QuantizedLinear,
)
from penstock.gpu_worker.model.quantization.recipe import Recipe
from penstock.shared.errors import ConfigurationError, ModelError, UnsupportedModel

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 256, 4, 2, 2
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"]
TOKENS = [*bytes_to_unicode().values(), "th", "<bos>", "<eos>"]


def coded(kind: str, shape: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and what they stand for, by the package gguf."""
    draw = np.random.default_rng(seed)
    kinds = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        values = draw.normal(0, 1.2 * shape[1] ** -0.5, shape).astype(np.float32)
        values[0, :32] = 0  # groups without scale or least
        values[1, :32] = 0.01  # a group with a least alone
        data = gguf.quantize(values, kinds)
        return data, gguf.dequantize(data, kinds)
    block, size = gguf.GGML_QUANT_SIZES[kinds]
    blocks = draw.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for index, place in enumerate(places):
        factor = {"Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 2e-5}[kind] * (8 if index else 1)
        scales = (factor * draw.uniform(0.5, 1, (len(blocks), 1))).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    if kind != "Q6_K":
        blocks[0, 4:16] = 0  # groups without scale or least
        blocks[1, 4] = 0  # a group with a least alone
    data = blocks.reshape(shape[0], -1)
    return data, gguf.dequantize(data, kinds)


def write(
    path: Path,
    kind: str,
    *,
    tied: bool,
    settings: Mapping[str, np.ndarray] | None = None,
    others: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A tiny model in GGUF; returns its tensors by GGUF's names, dequantised.

    Args:
        path: of the file.
        kind: of its matrices.
        tied: the embedding is the head, too.
        settings: tensors that are no weights of it.
        others: kinds of single matrices.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)
    dense: dict[str, Any] = {}
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN)}
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", kv, HIDDEN), ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN), ("ffn_down", HIDDEN, INNER),
        ):  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = (rows, columns)
    for seed, (name, shape) in enumerate(shapes.items()):
        own = (others or {}).get(name, kind)
        data, values = coded(own, shape, seed)
        dense[f"{name}.weight"] = values
        if own in ("F16", "F32"):
            writer.add_tensor(f"{name}.weight", data)
        else:
            writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[own])
    norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(LAYERS) for n in ("attn", "ffn"))]
    for name in norms:
        dense[f"{name}.weight"] = np.ones(HIDDEN, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", dense[f"{name}.weight"])
    for name, values in (settings or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def save_dense(folder: Path, file: Path, dense: dict[str, Any]) -> None:
    """The same model as transformers has it."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ends = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    tops = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
    state = {}
    for name, values in dense.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, end = stem.split(".")
            if end in ("attn_q", "attn_k"):  # llama.cpp has pairs of a head side by side
                heads = HEADS if end == "attn_q" else KV_HEADS
                pairs = values.reshape(heads, -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            stem = f"model.layers.{layer}.{ends[end]}"
        else:
            stem = tops[stem]
        state[f"{stem}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    file, tied = tmp_path / f"tiny.{kind}.gguf", kind in ("Q4_K", "Q8_0")
    save_dense(tmp_path / "dense", file, write(file, kind, tied=tied))
    loaded = load_model(file, device="cpu")
    try:
        assert greedy(loaded) == expected_greedy(tmp_path / "dense")
        layers = [m for m in loaded.model.modules() if isinstance(m, QuantizedLinear)]
        whole = kind in ("F16", "BF16")
        assert len(layers) == (0 if whole else 7 * LAYERS + 1)
        assert isinstance(loaded.model.model.embed_tokens, QuantizedEmbedding) != whole
        if not whole:  # the native program has taken the layers' weights
            weight = GGUFSource(file, load_config(file)).weight("lm_head", (len(TOKENS), HIDDEN))
            assert str(weight.bits) in kind
        ids = loaded.tokenizer("the")["input_ids"]
        assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == "the"
        assert len(fingerprint_of(loaded.path, "torch.float32")) == 16
    finally:
        loaded.close()


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_every_weight_is_what_gguf_says(kind: str) -> None:
    data, values = coded(kind, (64, 512), 3)
    form = repack(kind, torch.from_numpy(data), 512)
    # A least beside a scale is rounded to units of codes.
    assert torch.allclose(form.dequantize(), torch.from_numpy(values), rtol=0, atol=1e-6)
    counted = SourceBytes.of_codes(
        form.codes.numel(),
        BLOCKS[kind].bits,
        BLOCKS[kind].scales * form.codes.numel() // BLOCKS[kind].group,
    )
    assert counted == (form.num_bytes, form.packed_bytes)
    if form.zeros is None:
        assert torch.equal(form.dequantize(), torch.from_numpy(values))
    with pytest.raises(ValueError, match=f"are no {kind} of 480 weights"):
        repack(kind, torch.from_numpy(data), 480)


@pytest.mark.parametrize(("other", "count"), [("Q6_K", 3), ("F16", 2)])
def test_types_that_differ_within_a_product(
    other: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Q4_K_M, where the values of half of the layers are in Q6_K."""
    file = tmp_path / "tiny.gguf"
    dense = write(file, "Q4_K", tied=False, others={"blk.0.attn_v": other})
    save_dense(tmp_path / "dense", file, dense)
    counted = GGUFSource(file, load_config(file)).num_bytes(torch.float32)
    loaded = load_model(file, device="cpu")
    try:
        assert greedy(loaded) == expected_greedy(tmp_path / "dense")
        assert caplog.text.count(f"{count} linear layers are parts of products") == 1
        assert loaded.native is not None
        packed = loaded.native.program.weight_bytes
        embedding = loaded.model.model.embed_tokens
        packed += embedding.quantized.num_bytes + embedding.weight.nbytes
        if other in BLOCKS:  # both have a form in common, which is in neither's own bits
            assert counted.packed == pytest.approx(packed, rel=0.02)
    finally:
        loaded.close()


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "Q8_0", tied=False)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_model(tmp_path, device="cpu")  # a directory with one file stands for it


def test_types_that_are_not_served(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "TQ2_0", tied=False)
    with pytest.raises(UnsupportedModel, match=r"is TQ2_0; served: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"):
        load_model(file, device="cpu")


def test_blocks_are_quantised_weights_and_plain_types_are_not(tmp_path: Path) -> None:
    coded_file, full_file = tmp_path / "coded.gguf", tmp_path / "full.gguf"
    write(coded_file, "Q8_0", tied=False)
    write(full_file, "F16", tied=False)
    for method in ("none", "int4"):
        recipe = Recipe(method, group_size=32)
        with pytest.raises(ConfigurationError, match=f"got {method}, .* already .gguf"):
            load_model(coded_file, device="cpu", recipe=recipe)
        loaded = load_model(full_file, device="cpu", native="off", recipe=recipe)
        loaded.close()
        layers = [m for m in loaded.model.modules() if isinstance(m, QuantizedLinear)]
        assert len(layers) == (7 * LAYERS + 1 if method == "int4" else 0)


def test_plain_types_are_read_in_the_models_dtype(tmp_path: Path) -> None:
    """Else all of a file in F16 were in memory in float32 while the model is built."""
    file = tmp_path / "tiny.gguf"
    dense = write(file, "F16", tied=False)
    source = GGUFSource(file, load_config(file))
    assert {values.dtype for values in source.plain("auto").values()} == {torch.float32}
    found = source.plain(torch.bfloat16)
    assert {values.dtype for values in found.values()} == {torch.bfloat16}
    expected = torch.from_numpy(dense["output.weight"]).to(torch.bfloat16)
    assert torch.equal(found["lm_head.weight"], expected)

"""``penstock plan``: counted without weights, and the same as with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model.families import save_family

from penstock.gpu_worker.model.checkpoints.checkpoint_quantizer import (
    Method,
    QuantizeOptions,
    quantize_checkpoint,
)
from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.quantization.quantized_modules import QuantizedLinear
from penstock.producer.cli import main
from penstock.shared.errors import ModelNotFound


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma3n_text", "deepseek_v3", "gpt2"])
def test_keys_and_values_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    """Also where layers share them, differ, or cache other shapes than their heads."""
    folder = save_family(family, tmp_path / "model")
    loaded = load_model(folder, dtype="float32", device="cpu", native="off")
    plan = plan_memory(folder, memory_bytes=1 << 30)
    assert plan.formats[0].token_bytes == loaded.geometry.block_bytes(1, torch.float32)
    weights = {p.data_ptr(): p.numel() for p in loaded.model.parameters()}
    assert plan.parameters == sum(weights.values())


def test_the_first_format_that_fits(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path / "model")
    whole = plan_memory(folder, context=16, memory_bytes=1 << 30)
    names = [plan.name for plan in whole.formats if plan.kv_cache_dtype == "auto"]
    assert names == ["float32", "bfloat16", "int8", "fp8", "int4", "nf4"]
    assert [plan.name for plan in whole.formats if plan.kv_cache_dtype == "int8"] == names
    assert whole.first_fit == "float32"
    full, full_int8, bfloat16, *_ = whole.formats
    assert full_int8.token_bytes < full.token_bytes / 3
    needed = full.weight_bytes + 16 * full.token_bytes
    tight = plan_memory(folder, context=16, memory_bytes=int(needed / 0.9) - 2)
    assert tight.best_fit is not None
    assert (tight.best_fit.name, tight.best_fit.kv_cache_dtype) == ("float32", "int8")
    needed = bfloat16.weight_bytes + 16 * bfloat16.token_bytes
    tight = plan_memory(folder, context=16, memory_bytes=int(needed / 0.9) + 2)
    assert tight.first_fit == "bfloat16"
    assert tight.formats[2].sequences == 1
    assert tight.formats[0].missing_bytes > 0
    assert plan_memory(folder, context=16, memory_bytes=1).first_fit is None


def test_on_a_gpu_the_kv_cache_in_8_bits_is_fp8(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path / "model")
    formats = plan_memory(
        folder, context=16, memory_bytes=1 << 30, device=torch.device("cuda"), dtype="bfloat16"
    ).formats
    assert {plan.kv_cache_dtype for plan in formats} == {"auto", "fp8"}
    full, small = formats[2:4]
    assert (small.name, small.kv_cache_dtype) == ("bfloat16", "fp8")
    # 16 numbers take 32 bytes or, with their scale, 17.
    assert full.token_bytes * 17 == small.token_bytes * 32


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_takes_what_the_plan_of_its_original_says(
    method: Method, dtype: str, tied: bool, tmp_path: Path
) -> None:
    """The dtype beside codes is the worker's, the head is full, and codes have a byte at first."""
    folder = save_family(
        "llama", tmp_path / "model", intermediate_size=128, tie_word_embeddings=tied
    )
    copy = tmp_path / "copy"
    quantize_checkpoint(folder, copy, QuantizeOptions(method=method), lambda *_: None)
    plan = plan_memory(folder, memory_bytes=1 << 30, dtype=dtype)
    planned = next(p for p in plan.formats if p.name == method)
    own = plan_memory(copy, memory_bytes=1 << 30, dtype=dtype).formats[0]
    loaded = load_model(copy, dtype=dtype, device="cpu", native="off", prepack=False)
    try:
        layers = [m for m in loaded.model.modules() if isinstance(m, QuantizedLinear)]
        numbers = sum(p.nbytes for p in loaded.model.parameters())
        assert planned.dtype == own.dtype == str(loaded.dtype).removeprefix("torch.")
        assert planned.token_bytes == loaded.geometry.block_bytes(1, loaded.dtype)
        held = numbers + sum(layer.quantized.num_bytes for layer in layers)
        packed = numbers + sum(layer.quantized.packed_bytes for layer in layers)
        # On a CPU the plan counts the head once more where it is the embedding, too.
        head = loaded.model.lm_head.weight
        assert (head is loaded.model.get_input_embeddings().weight) == tied
        if tied:
            held, packed = held + head.nbytes, packed + head.nbytes
        assert planned.load_bytes == pytest.approx(held, rel=0.02)
        assert planned.weight_bytes == pytest.approx(packed, rel=0.02)
        assert own.load_bytes == pytest.approx(held, rel=0.02)
        assert own.weight_bytes == pytest.approx(packed, rel=0.02)
    finally:
        loaded.close()


def test_a_plan_that_cannot_be_loaded_does_not_fit(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path / "model")
    nf4 = plan_memory(folder, context=1, memory_bytes=1 << 30).formats[-2]
    assert (nf4.name, nf4.kv_cache_dtype) == ("nf4", "auto")
    assert nf4.load_bytes > 2 * nf4.weight_bytes
    tight = plan_memory(folder, context=1, memory_bytes=int(nf4.load_bytes / 0.9) - 2)
    assert tight.formats[-2].sequences == 0
    assert tight.formats[-2].missing_bytes > 0


def test_experts_are_in_codes_where_they_are_rounded_at_load(tmp_path: Path) -> None:
    folder = save_family("mixtral", tmp_path / "model")
    formats = plan_memory(folder, memory_bytes=1 << 30, dtype="float32").formats
    weights = {plan.name: plan.weight_bytes for plan in formats}
    # Three layers of four experts with three matrices of 64 x 96 each, from 32 bits to 4.5.
    experts = 3 * 4 * 3 * 64 * 96
    saved = experts * 4 - (experts // 2 + experts // 64 * 4)
    assert weights["int4"] - weights["nf4"] == saved
    assert weights["int8"] > weights["int4"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "1GiB", "--context", "100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["context"], facts["first_fit"]) == (100, "float32")
    assert main(["plan", "--memory", "1MiB"]) == 1
    assert "it fits in none" in capsys.readouterr().out
    assert main(["plan", "--dtype", "float8"]) == 2
    assert "--dtype: got 'float8'; allowed: auto, float32" in capsys.readouterr().err
    assert main(["plan", "--memory", "much"]) == 2
    assert "memory size: got 'much'" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound):
        plan_memory("/nowhere")

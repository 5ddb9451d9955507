"""Quantised checkpoints give, token by token, what their dequantised weights give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.checkpoints.greedy_tokens import expected_greedy, greedy
from model.checkpoints.quantised_checkpoints import (
    awq,
    bnb_four,
    bnb_int8,
    compressed,
    gptq,
    rewrite,
    rewrite_experts,
)
from model.families import save_family
from safetensors.torch import load_file

from penstock.gpu_worker.model.loading.checkpoint import load_config, quantized_source
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.loading.model_opening import open_model
from penstock.gpu_worker.model.quantization.formats.checkpoint_formats import format_of
from penstock.gpu_worker.model.quantization.formats.quantized_source import SafetensorsSource
from penstock.gpu_worker.model.quantization.formats.stored_tensors import StoredTensors
from penstock.gpu_worker.model.quantization.quantized_modules import (
    QuantizedLinear,
    QuantizedStack,
)


def _gptq(bits: int, size: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    version = options.pop("version", 1)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size,
        "desc_act": options["act_order"], "sym": options["symmetric"],
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return gptq(bits, size, version=version, **options), config


def _bnb(**config: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", **config}


FORMATS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "gptq": lambda: _gptq(4, 32, symmetric=True, act_order=False),
    "gptq-asym": lambda: _gptq(4, 32, symmetric=False, act_order=False),
    "gptq-8-asym": lambda: _gptq(8, 32, symmetric=False, act_order=False),
    "gptq-v2": lambda: _gptq(4, 32, symmetric=False, act_order=False, version=2),
    "gptq-act-order": lambda: _gptq(4, 16, symmetric=False, act_order=True),
    "gptq-8": lambda: _gptq(8, 32, symmetric=False, act_order=True, version=2),
    "gptq-8-sym": lambda: _gptq(8, 16, symmetric=True, act_order=False),
    "awq": lambda: (
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
    "bnb-nf4": lambda: (
        bnb_four(double=False), _bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ),
    "bnb-nf4-double": lambda: (
        bnb_four(double=True), _bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ),
    "bnb-fp4": lambda: (
        bnb_four(double=False, kind="fp4"), _bnb(load_in_4bit=True, bnb_4bit_quant_type="fp4")
    ),
    "bnb-int8": lambda: (bnb_int8, _bnb(load_in_8bit=True)),
    "ct-int4": lambda: compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
    ),
    "ct-int4-asym": lambda: compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False
    ),
    "ct-int8-packed": lambda: compressed(
        "pack-quantized", num_bits=8, type="int", strategy="channel"
    ),
    "ct-int8": lambda: compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct-int8-tensor": lambda: compressed(
        "int-quantized", num_bits=8, type="int", strategy="tensor"
    ),
    "ct-int8-asym": lambda: compressed(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "ct-int8-grouped": lambda: compressed(
        "int-quantized", num_bits=8, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "ct-fp8-tensor": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="tensor"
    ),
    "ct-fp8-group": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="group", group_size=32
    ),
    "ct-fp8": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-block": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
}  # fmt: skip


def check_counted(loaded: LoadedModel, folder: Path) -> None:
    """What weights take is known from the headers of their tensors."""
    numbers = sum(parameter.nbytes for parameter in loaded.model.parameters())
    weights = []
    for module in loaded.model.modules():
        stacks = (value for value in vars(module).values() if isinstance(value, QuantizedStack))
        weights += [weight for stack in stacks for weight in stack.experts]
        weights += [module.quantized] if isinstance(module, QuantizedLinear) else []
    source = quantized_source(folder, load_config(folder))
    assert source is not None
    counted = source.num_bytes(torch.float32)
    # Zeros that are all alike count, and are dropped; scales of blocks of rows are repeated.
    assert 0.9 < counted.loaded / (numbers + sum(w.num_bytes for w in weights)) < 1.2
    assert 0.9 < counted.packed / (numbers + sum(w.packed_bytes for w in weights)) < 1.2


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_dequantised_model(
    name: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write, config = FORMATS[name]()
    # With biases, which stay as they are.
    rewrite(checkpoint("qwen2"), tmp_path / "coded", write, config, tmp_path / "dense")
    native = load_model(tmp_path / "coded", device="cpu")
    assert greedy(native) == expected_greedy(tmp_path / "dense")
    multiplied = native.multiplied_weights
    native.close()
    dense_layers = "21 linear layers have permuted inputs (desc_act)" in caplog.text
    assert dense_layers == bool(config.get("desc_act"))
    # What the native library packs is given up; so the weights are looked at without it.
    loaded = load_model(tmp_path / "coded", device="cpu", native="off")
    try:
        check_counted(loaded, tmp_path / "coded")
        assert greedy(loaded) == expected_greedy(tmp_path / "dense")
        dense = load_file(tmp_path / "dense" / "model.safetensors")
        linears = sum(w.numel() for name, w in dense.items() if name.endswith("_proj.weight"))
        head = loaded.vocab_size * loaded.model.config.hidden_size
        assert multiplied == loaded.multiplied_weights == linears + head
        found = 0
        for module, layer in loaded.model.named_modules():
            if isinstance(layer, QuantizedLinear):
                weight = layer.quantized.dequantize()
                torch.testing.assert_close(weight, dense[f"{module}.weight"], rtol=1e-6, atol=1e-7)
                found += 1
        assert found == 3 * 7
    finally:
        loaded.close()


@pytest.mark.parametrize("name", ["gptq-asym", "gptq-8-asym"])
def test_a_zero_point_of_0_borrows_from_its_word_in_gptq_v1(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    write, config = FORMATS[name]()

    def partly_positive(weight: torch.Tensor) -> Any:
        weight[::3] = weight[::3].abs()
        return write(weight)

    rewrite(checkpoint("llama"), tmp_path / "coded", partly_positive, config, tmp_path / "dense")
    dense = load_file(tmp_path / "dense/model.safetensors")
    source = SafetensorsSource(StoredTensors(tmp_path / "coded"), format_of(config))
    form = source.weight("model.layers.1.mlp.up_proj", (96, 64))
    assert form.zeros is not None
    assert (float(form.zeros.min()), float(form.zeros[:, 0].argmin())) == (0, 0)
    expected = dense["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(form.dequantize(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "bnb-nf4", "ct-int4-asym"])
def test_a_later_start_reads_the_codes_by_the_record_of_the_first(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    write, config = FORMATS[name]()
    rewrite(checkpoint("qwen2"), tmp_path / "coded", write, config)
    outputs = []
    for start in range(2):
        opened = open_model(tmp_path / "coded", device="cpu", cache=tmp_path / "cache")
        if opened.loaded.native is None:
            pytest.skip("no native library here")
        opened.remember()
        assert opened.is_known == bool(start)
        outputs.append(greedy(opened.loaded))
        opened.loaded.close()
    assert outputs[0] == outputs[1]


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    # Rows that blocks of 32 divide, as gpt-oss has them.
    source = save_family("gpt_oss", tmp_path)
    rewrite_experts(source, tmp_path / "coded", tmp_path / "dense")
    expected = expected_greedy(tmp_path / "dense")
    native = load_model(tmp_path / "coded", device="cpu", native="on")
    try:
        assert greedy(native) == expected
        multiplied = native.multiplied_weights
    finally:
        native.close()
    loaded = load_model(tmp_path / "coded", device="cpu", native="off")
    try:
        check_counted(loaded, tmp_path / "coded")
        assert greedy(loaded) == expected
        experts = loaded.model.model.layers[0].mlp.experts
        dense = load_file(tmp_path / "dense" / "model.safetensors")
        stacks = sum(weight.numel() for weight in dense.values() if weight.dim() == 3)
        linears = sum(w.numel() for name, w in dense.items() if name.endswith("_proj.weight"))
        head = loaded.vocab_size * loaded.model.config.hidden_size
        # Of four experts a token has two; routers, which are small, only the program counts.
        assert loaded.multiplied_weights == linears + head + stacks // 2
        assert multiplied == pytest.approx(loaded.multiplied_weights, rel=0.02)
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(experts, name)
            assert isinstance(stack, QuantizedStack)
            assert torch.equal(stack[1], dense[f"model.layers.0.mlp.experts.{name}"][1])
    finally:
        loaded.close()

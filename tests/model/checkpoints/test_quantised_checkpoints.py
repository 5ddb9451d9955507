"""Quantised checkpoints give, token by token, what their dequantised weights give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.checkpoints.greedy_tokens import expected_greedy, greedy
from model.checkpoints.quantised_checkpoints import (
    awq,
    bnb_int8,
    bnb_nf4,
    compressed,
    gptq,
    rewrite,
    rewrite_experts,
)
from model.families import save_family
from safetensors.torch import load_file, save_file

from penstock.gpu_worker.model.loading import checkpoint as checkpoint_module
from penstock.gpu_worker.model.loading.checkpoint import load_config, quantized_source
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.loading.model_opening import open_model
from penstock.gpu_worker.model.quantization.formats.checkpoint_formats import format_of
from penstock.gpu_worker.model.quantization.quantized_modules import (
    QuantizedLinear,
    QuantizedStack,
)
from penstock.shared.errors import (
    InsufficientMemory,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
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
    "gptq-v2": lambda: _gptq(4, 32, symmetric=False, act_order=False, version=2),
    "gptq-act-order": lambda: _gptq(4, 16, symmetric=False, act_order=True),
    "gptq-8": lambda: _gptq(8, 32, symmetric=False, act_order=True, version=2),
    "gptq-8-sym": lambda: _gptq(8, 16, symmetric=True, act_order=False),
    "awq": lambda: (
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
    "bnb-nf4": lambda: (
        bnb_nf4(double=False), _bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ),
    "bnb-nf4-double": lambda: (
        bnb_nf4(double=True), _bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")
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


def test_codes_that_do_not_fit_before_they_are_packed_are_refused(
    coded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quantized_source(coded, load_config(coded))
    assert source is not None
    counted = source.num_bytes(torch.float32)
    between = (counted.loaded + counted.packed) // 2
    assert sum(file.stat().st_size for file in coded.glob("*.safetensors")) < between
    monkeypatch.setattr(checkpoint_module, "available_bytes", lambda device: int(between / 0.9))
    with pytest.raises(InsufficientMemory, match=r"as float32, with a byte for each code until"):
        load_model(coded, device="cpu")


@pytest.fixture(scope="module")
def coded(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "gptq"
    write, config = FORMATS["gptq"]()
    rewrite(checkpoint("llama"), folder, write, config)
    return folder


def changed(coded: Path, target: Path, **settings: Any) -> Path:
    """The checkpoint with other settings of its quantisation."""
    target.mkdir()
    for file in coded.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tree = json.loads((target / "config.json").read_text())
    tree["quantization_config"] |= settings
    (target / "config.json").write_text(json.dumps(tree))
    return target


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq'; served: awq, bitsandbytes"),
        ({"bits": 3}, "GPTQ checkpoint has bits 3; served: 4, 8; quantise the unquantised"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'; served: gptq, gptq_v2"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'; served: gemm"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "bits of their own"),
    ],
)
def test_what_is_not_served_is_named(
    coded: Path, tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        load_model(changed(coded, tmp_path / "changed", **settings), device="cpu")
    assert text in str(refused.value)


def _with_transform(location: str) -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": location, "inverse": False}]
    return {"config_groups": {"u": {"type": "hadamard", "apply": apply}}}


def test_transforms_of_activations_are_refused() -> None:
    _, config = FORMATS["ct-int8"]()
    for computed in ({}, None, _with_transform("weight_input")):
        assert format_of(config | {"transform_config": computed}).bits == 8
    with pytest.raises(UnsupportedModel, match=r"transform location 'input'; served: weight_input"):
        format_of(config | {"transform_config": _with_transform("input")})


def _with(tensors: dict[str, Any], name: str, change: Callable[[Any], Any]) -> None:
    tensors[name] = change(tensors[name]).contiguous()


NAME = "model.layers.1.mlp.up_proj"
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "cut": (
        lambda t: _with(t, f"{NAME}.qweight", lambda x: x[:-1]),
        "its shape is [7, 96], expected: [8, 96]",
    ),
    "type": (
        lambda t: _with(t, f"{NAME}.qzeros", lambda x: x.to(torch.int64)),
        "it holds I64, expected: I32",
    ),
    "groups": (
        lambda t: _with(t, f"{NAME}.g_idx", lambda x: torch.zeros_like(x)),
        "g_idx does not divide the inputs into groups of 32",
    ),
    "infinite": (
        lambda t: _with(t, f"{NAME}.scales", lambda x: x * torch.inf),
        "scales that are not finite",
    ),
    "missing": (lambda t: t.pop(f"{NAME}.scales"), f"lacks tensor '{NAME}.scales'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupt_tensor_is_named(coded: Path, tmp_path: Path, fault: str) -> None:
    folder = changed(coded, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    change, text = FAULTS[fault]
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_model(folder, device="cpu")
    assert text in str(refused.value)
    assert NAME in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "scale", "stored"),
    [
        ("ct-int8", "weight_scale", "I8"),
        ("ct-fp8", "weight_scale", "F8_E4M3"),
        ("bnb-int8", "SCB", "I8"),
    ],
)
def test_codes_without_a_scale_are_no_weights(
    name: str, scale: str, stored: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    write, config = FORMATS[name]()
    rewrite(checkpoint("llama"), tmp_path / "coded", write, config)
    file = tmp_path / "coded/model.safetensors"
    tensors = load_file(file)
    del tensors[f"{NAME}.{scale}"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_model(tmp_path / "coded", device="cpu")
    assert f"{NAME}.weight' is unusable: it holds codes ({stored}) without" in str(refused.value)


def test_a_truncated_file_is_named(coded: Path, tmp_path: Path) -> None:
    folder = changed(coded, tmp_path / "broken")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_model(folder, device="cpu")


def test_a_missing_shard_is_named(coded: Path, tmp_path: Path) -> None:
    folder = changed(coded, tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    places = {name: shards["layers.2" in name] for name in tensors}
    save_file({n: t for n, t in tensors.items() if places[n] == shards[0]}, folder / shards[0])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelNotFound) as refused:
        load_model(folder, device="cpu")
    assert f"lacks 1 of its 2 weights files ({shards[1]})" in str(refused.value)


def test_a_layer_that_the_model_lacks_is_named(coded: Path, tmp_path: Path) -> None:
    folder = changed(coded, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.9.mlp.up_proj.qweight"] = torch.zeros(8, 96, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"quantises 'model\.layers\.9\.mlp\.up_proj'"):
        load_model(folder, device="cpu")


def test_tensors_without_a_place_are_named(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """As AutoAWQ has them for StarCoder2, whose activations are divided by them."""
    write, config = FORMATS["awq"]()
    rewrite(checkpoint("starcoder2"), tmp_path / "coded", write, config)
    file, layer = tmp_path / "coded/model.safetensors", "model.layers.1"
    tensors = load_file(file) | {
        f"{layer}.mlp.up_proj.bias": torch.zeros(96),
        f"{layer}.self_attn.k_scale": torch.ones(1),
        f"{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    load_model(tmp_path / "coded", device="cpu", native="off").close()  # these change nothing
    scales = {f"{layer}.mlp.act.scales": torch.full((96,), 2.0)}
    save_file(tensors | scales, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"1 tensors .*\(model\.layers\.1\.mlp\.act\.scales"):
        load_model(tmp_path / "coded", device="cpu", native="off")

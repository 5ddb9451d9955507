"""Quantised checkpoints that cannot be served, or are damaged, are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.checkpoints.quantised_checkpoints import rewrite
from model.checkpoints.test_quantised_checkpoints import FORMATS
from safetensors.torch import load_file, save_file

from penstock.gpu_worker.model.loading import checkpoint as checkpoint_module
from penstock.gpu_worker.model.loading.checkpoint import load_config, quantized_source
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.quantization.formats.checkpoint_formats import format_of
from penstock.gpu_worker.model.quantization.formats.quantized_source import SafetensorsSource
from penstock.gpu_worker.model.quantization.formats.stored_tensors import StoredTensors
from penstock.shared.errors import (
    InsufficientMemory,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)

NAME = "model.layers.1.mlp.up_proj"


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


@pytest.mark.parametrize("target", [NAME, r"re:.*layers\.1\.mlp\.up_proj$"])
def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_class(
    target: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whatever the order of the groups: here the first would have the codes of all layers."""
    write, config = FORMATS["ct-int8"]()
    rewrite(checkpoint("llama"), tmp_path / "coded", write, config)
    group = config["config_groups"]["group_0"]
    by_tensor = group | {"targets": [target], "weights": group["weights"] | {"strategy": "tensor"}}
    pattern = by_tensor | {"targets": ["re:.*up_proj"], "weights": group["weights"]}
    config["config_groups"] = {"all": group, "one": by_tensor, "some": pattern}
    source = SafetensorsSource(StoredTensors(tmp_path / "coded"), format_of(config))
    source.weight("model.layers.0.mlp.up_proj", (96, 64))
    with pytest.raises(ModelError, match=rf"{NAME}\.weight_scale' is unusable: 96 scales"):
        source.weight(NAME, (96, 64))


def test_a_class_is_that_of_the_layer(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    write, config = FORMATS["ct-int8"]()
    rewrite(checkpoint("llama"), tmp_path / "coded", write, config)
    group = config["config_groups"]["group_0"]
    by_tensor = {"targets": ["Embedding"], "weights": group["weights"] | {"strategy": "tensor"}}
    config["config_groups"] = {"embedding": group | by_tensor, "others": group}
    source = SafetensorsSource(StoredTensors(tmp_path / "coded"), format_of(config))
    source.weight(NAME, (96, 64))
    alone = format_of(config | {"config_groups": {"embedding": group | by_tensor}})
    source = SafetensorsSource(StoredTensors(tmp_path / "coded"), alone)
    with pytest.raises(ModelError, match=r"no config group targets its layer"):
        source.weight(NAME, (96, 64))


def test_a_target_that_is_no_pattern_is_named() -> None:
    _, config = FORMATS["ct-int8"]()
    config["config_groups"]["group_0"]["targets"] = ["re:*_proj"]
    with pytest.raises(ModelError, match=r"has the target 're:\*_proj', which is no pattern"):
        format_of(config)


def _grouped(size: object) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("gptq", {"group_size": "all"}, "has group_size 'all', and GPTQ a whole number"),
        ("awq", {"group_size": [128]}, "has group_size [128], and AWQ a whole number"),
        ("gptq", {"dynamic": [1]}, "is no gptq one (AttributeError"),
        ("ct-int8", {"sparsity_config": "dense"}, "has sparsity_config 'dense', which is no"),
        ("ct-int8", {"config_groups": {}, "transform_config": [1]}, "no compressed-tensors one"),
        ("ct-int8", {"config_groups": None}, "is no compressed-tensors one (AttributeError"),
        ("ct-int4", _grouped("all"), "has group_size 'all', and compressed-tensors a whole"),
        ("ct-int4", _grouped(None), "has strategy 'group' with group_size 0"),
    ],
)
def test_a_field_that_cannot_be_is_named(name: str, change: dict[str, Any], text: str) -> None:
    _, config = FORMATS[name]()
    with pytest.raises(ModelError) as refused:
        format_of(config | change)
    assert text in str(refused.value)


def _with(tensors: dict[str, Any], name: str, change: Callable[[Any], Any]) -> None:
    tensors[name] = change(tensors[name]).contiguous()


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


def _without_blocks(tensors: dict[str, Any]) -> None:
    name = f"{NAME}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    del state["nested_blocksize"]
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("bnb-nf4-double", _without_blocks, "weight.nested_absmax' is unusable: the state has no"),
        (
            "ct-fp8",
            lambda t: _with(t, f"{NAME}.weight", lambda x: torch.full_like(x, torch.nan)),
            "weight' is unusable: codes that are no number",
        ),
        (
            "ct-int8-grouped",
            lambda t: t.update({f"{NAME}.weight_zero_point": torch.zeros(1, dtype=torch.int8)}),
            "weight_zero_point' is unusable: 1 zero points, expected: 192",
        ),
        (
            "ct-int8",
            lambda t: _with(t, "model.norm.weight", lambda x: x * torch.nan),
            "tensor 'model.norm.weight' has values that are not finite",
        ),
    ],
)
def test_a_corrupt_tensor_of_other_formats_is_named(
    name: str,
    change: Callable[[dict[str, Any]], object],
    text: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    write, config = FORMATS[name]()
    rewrite(checkpoint("llama"), tmp_path / "coded", write, config)
    file = tmp_path / "coded/model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_model(tmp_path / "coded", device="cpu")
    assert text in str(refused.value)
    assert str(tmp_path / "coded") in str(refused.value)


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
        f"{layer}.self_attn.kv_scale": torch.ones(1),
        f"{layer}.self_attn.k_proj.output_zero_point": torch.ones(1),
        f"{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    load_model(tmp_path / "coded", device="cpu", native="off").close()  # these change nothing
    scales = {f"{layer}.mlp.act.scales": torch.full((96,), 2.0)}
    save_file(tensors | scales, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"1 tensors .*\(model\.layers\.1\.mlp\.act\.scales"):
        load_model(tmp_path / "coded", device="cpu", native="off")

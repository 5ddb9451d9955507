"""Models quantised at load: computed natively as by transformers over dequantised weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.gpu_worker.model.forward.batch import Rows, SequenceChunk, pack
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.checkpoint import load_config, quantized_source
from penstock.gpu_worker.model.loading.checkpoint_folder import find_checkpoint, is_quantized
from penstock.gpu_worker.model.loading.fingerprint import fingerprint_of
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.loading.model_opening import open_model
from penstock.gpu_worker.model.quantization.coding import matrix_parts, packed_bytes
from penstock.gpu_worker.model.quantization.form import QuantizedWeight
from penstock.gpu_worker.model.quantization.quantized_modules import QuantizedLinear
from penstock.gpu_worker.model.quantization.recipe import (
    Recipe,
    quantize_model,
    resolve_preferences,
)
from penstock.kernels.cpu import CodedWeight, Codes, NativeUnavailable, load_library
from penstock.shared.errors import ConfigurationError, ModelError, ModelNotFound
from penstock.shared.settings import ModelSettings, load_settings

try:
    load_library()
except NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

RECIPES = [
    Recipe("int8"),
    Recipe("int8", per_tensor=True, head="same"),
    Recipe("int4", group_size=32),
    Recipe("int4", group_size=64, symmetric=False, keep=("*.o_proj", "lm_head")),
    Recipe("nf4", head="full"),
    Recipe("fp8"),
]


@torch.inference_mode()
def logits(loaded: LoadedModel) -> Tensor:
    ids = torch.randint(0, loaded.vocab_size, (40,), generator=torch.Generator().manual_seed(7))
    pool = KVPool(loaded.geometry, 4, 16, loaded.device, loaded.dtype)
    chunk = SequenceChunk(ids.tolist(), 0, [[2, 0, 3]], Rows.ALL)
    return loaded.forward(pack([chunk], pool), pool).float()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_native_steps_are_those_of_the_dequantised_model(recipe: Recipe) -> None:
    exact = load_model("demo-draft", dtype="float32", native="off", recipe=recipe, prepack=False)
    native = load_model("demo-draft", dtype="float32", native="on", recipe=recipe)
    full = load_model("demo-draft", dtype="float32", native="on")
    assert relative(logits(native), logits(exact)) < 1e-5
    assert 1e-4 < relative(logits(native), logits(full)) < 0.5
    half = load_model("demo-draft", dtype="bfloat16", native="on", recipe=recipe)
    assert relative(logits(half), logits(exact)) < 5e-2
    kept = {
        name.rpartition(".")[2]
        for name, layer in exact.model.named_modules()
        if type(layer) is nn.Linear
    }
    expected = {pattern.rpartition(".")[2] for pattern in recipe.keep}
    assert kept == expected | ({"lm_head"} if recipe.head == "full" else set())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_starts_quantise_again_from_the_record(tmp_path: Path, dtype: str) -> None:
    for recipe in (Recipe("int4"), Recipe("int8", head="full")):
        first = open_model("demo-draft", dtype=dtype, native="on", recipe=recipe, cache=tmp_path)
        assert not first.is_known
        first.remember()
        second = open_model("demo-draft", dtype=dtype, native="on", recipe=recipe, cache=tmp_path)
        assert second.is_known
        assert torch.equal(logits(first.loaded), logits(second.loaded))
        assert second.loaded.recipe == recipe
    other = open_model("demo-draft", dtype=dtype, native="on", cache=tmp_path)
    assert not other.is_known


def test_a_quantised_model_is_another_model() -> None:
    folder = find_checkpoint("demo-draft")
    recipes = [Recipe(), *RECIPES]
    assert len({fingerprint_of(folder, "float32", str(recipe)) for recipe in recipes}) == 7
    assert fingerprint_of(folder, "float32", str(Recipe("none"))) == fingerprint_of(
        folder, "float32"
    )


def test_a_quantised_checkpoint_goes_with_auto_alone(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    for method in ("none", "int4"):
        with pytest.raises(ConfigurationError, match=f"got {method}, .* quantised already .gptq"):
            Recipe(method).check(quantization)
        Recipe(method).check(None)
    Recipe("auto").check(quantization)
    folder = tmp_path / "model"
    shutil.copytree(find_checkpoint("demo-draft"), folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.rstrip()[:-1] + ', "quantization_config": {"quant_method": "gptq", "bits": 4}}'
    )
    with pytest.raises(ConfigurationError, match=r"model\.quantization: got none"):
        load_model(folder, recipe=Recipe("none"))


def test_the_language_models_part_may_say_how_a_checkpoint_is_quantised(tmp_path: Path) -> None:
    described = {"quant_method": "gptq", "bits": 4}
    tree = {"model_type": "gemma3", "text_config": {"quantization_config": described}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigurationError, match=r"got none, .* quantised already .gptq"):
        load_model(tmp_path, recipe=Recipe("none"))
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):  # it looks for codes
        quantized_source(tmp_path, load_config(tmp_path))


def test_what_is_preferred_gives_way_and_what_is_asked_for_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = load_settings({"worker.profile": "memory"}, environment={}).model
    asked = load_settings(
        {"worker.profile": "memory", "model.quantization": "int8", "model.kv_cache_dtype": "int8"},
        environment={},
    ).model

    def found(settings: ModelSettings, *, quantized: bool, on_cpu: bool) -> tuple[str, str]:
        decided = resolve_preferences(settings, quantized=quantized, on_cpu=on_cpu)
        return decided.quantization, decided.kv_cache_dtype

    with caplog.at_level("INFO"):
        assert found(memory, quantized=False, on_cpu=True) == ("int8", "int8")
        assert not caplog.records
        assert found(memory, quantized=True, on_cpu=False) == ("auto", "fp8")
    assert len(caplog.records) == 1
    assert "model.quantization: prefer-int8 gives way to auto: the checkpoint is" in caplog.text
    for quantized in (False, True):
        assert found(asked, quantized=quantized, on_cpu=not quantized) == ("int8", "int8")

    folder = find_checkpoint("demo-draft")
    assert not is_quantized(folder)
    assert not is_quantized(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    described = {"quant_method": "gptq", "bits": 4}
    for tree in (
        config | {"quantization_config": described},
        config | {"text_config": {"quantization_config": described}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(tree))
        assert is_quantized(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert not is_quantized(tmp_path)


def test_groups_that_the_library_does_not_compute_with_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.quantization_group"):
        load_settings({"model.quantization_group": 50}, environment={})
    for size in (0, 12):
        load_model("demo-draft", native="on", recipe=Recipe("int4", group_size=size)).close()
    assert "dequantised" not in caplog.text
    loaded = load_model("demo-draft", native="on", recipe=Recipe("int4", group_size=50))
    loaded.close()
    count = sum(isinstance(m, QuantizedLinear) for m in loaded.model.modules()) - 1  # the head
    assert f"{count} linear layers have groups whose inputs are no multiple of 4" in caplog.text


def test_a_pattern_that_keeps_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe("int8", keep=("*.down_proj", "lm_head", "*.dwon_proj"))
    load_model("demo-draft", native="off", recipe=recipe).close()
    assert "quantization_keep: '*.dwon_proj' matches no module" in caplog.text
    assert caplog.text.count("matches no module") == 1


def test_weights_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data[2, 3] = torch.inf
    with pytest.raises(ModelError, match=r"1\.weight: .* not finite"):
        quantize_model(model, Recipe("int4"))


def layer(method: str, **options: Any) -> QuantizedLinear:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    return QuantizedLinear(Recipe(method, **options).quantize(weight, "layer"))


@pytest.mark.parametrize(
    ("mixed", "kind", "group"),
    [
        ([layer("int4", group_size=32), layer("int8")], Codes.INT8, 32),
        ([layer("int8"), layer("int4", group_size=16, symmetric=False)], Codes.INT8, 16),
        ([layer("int4", group_size=16), layer("int4", group_size=0)], Codes.INT4, 16),
        # The last group is shorter, and what is cut of it runs over the end.
        ([layer("int4", group_size=48, symmetric=False), layer("int8")], Codes.INT8, 16),
        ([layer("int4", group_size=48), layer("int4", group_size=32)], Codes.INT4, 16),
    ],
)
def test_parts_of_different_forms_get_one_without_changing_a_number(
    mixed: list[QuantizedLinear], kind: Codes, group: int
) -> None:
    parts = matrix_parts(mixed, torch.float32)
    for part, one in zip(parts, mixed, strict=True):
        assert isinstance(part, CodedWeight)
        assert (part.kind, part.group) == (kind, group)
        assert part.goes_with(parts[0])  # type: ignore[arg-type]
        codes = part.codes.float() - (8 if kind is Codes.INT4 else 0)
        values = codes * part.scales.repeat_interleave(group, dim=1)
        if part.offsets is not None:
            values += part.offsets.repeat_interleave(group, dim=1)
        assert torch.allclose(values, one.quantized.dequantize(), rtol=0, atol=1e-5)
    stored = sum(
        part.codes.numel() // (2 if kind is Codes.INT4 else 1)
        + part.scales.nbytes * (1 if part.offsets is None else 2)
        for part in parts
        if isinstance(part, CodedWeight)
    )
    assert packed_bytes(mixed, torch.float32) == stored


def test_parts_without_a_common_form_are_computed_in_full() -> None:
    """Projections that are quantised otherwise than their neighbours, or whose inputs are mixed."""
    mixed = [layer("nf4"), layer("int8")]
    parts = matrix_parts(mixed, torch.float32)
    assert packed_bytes(mixed, torch.bfloat16) == 2 * 2 * 8 * 64
    for part, one in zip(parts, mixed, strict=True):
        assert isinstance(part, Tensor)
        assert torch.equal(part, one.quantized.dequantize())
    form = layer("int4").quantized
    moved = QuantizedWeight(
        4, form.codes, form.scales, group_size=64, permutation=torch.arange(64).flip(0)
    )
    (part,) = matrix_parts([QuantizedLinear(moved)], torch.float32)
    assert isinstance(part, Tensor)
    assert torch.equal(part, form.dequantize().flip(1))

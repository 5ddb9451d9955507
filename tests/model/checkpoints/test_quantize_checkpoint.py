"""`penstock quantize`: what it writes is read by penstock and by transformers alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from penstock.gpu_worker.model.checkpoints.checkpoint_quantizer import (
    QuantizeOptions,
    quantize_checkpoint,
)
from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.loading.stored_sizes import loaded_bytes
from penstock.gpu_worker.model.quantization.formats.stored_tensors import StoredTensors
from penstock.gpu_worker.model.quantization.quantized_modules import QuantizedLinear
from penstock.gpu_worker.model.quantization.quantizers import quantize_int4
from penstock.gpu_worker.model.quantization.scale_search import search_scales
from penstock.producer.cli import main
from penstock.shared.errors import ConfigurationError, ModelError, UnsupportedModel
from penstock.tools.verify.options import VerifyOptions
from penstock.tools.verify.verification import verify_model

OPTIONS = {
    "int4": QuantizeOptions(method="int4", group_size=32),
    "int4-asym": QuantizeOptions(method="int4", group_size=16, symmetric=False),
    "int4-texts": QuantizeOptions(method="int4", group_size=32, texts=("abc def", "g h i")),
    "int8-scaled": QuantizeOptions(method="int8", texts=("abc def",), scale_channels=True),
    "int8": QuantizeOptions(method="int8"),
    "fp8": QuantizeOptions(method="fp8"),
}


def silent(*_: object) -> None:
    pass


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", OPTIONS)
def test_penstock_and_transformers_read_the_same_weights(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target, told = tmp_path / "coded", []
    reports = quantize_checkpoint(
        checkpoint("llama"), target, OPTIONS[name], lambda *step: told.append(step)
    )
    assert ("quantising", 20, 21) in told
    assert len(reports) == 21
    assert all(0 < report.error < 0.2 and not report.kept for report in reports)
    assert sum(r.bytes_after for r in reports) < 0.4 * sum(r.bytes_before for r in reports)
    # transformers 5.23 makes room for packed zero points as if they were not packed, but for this.
    config = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, **(config if "asym" in name else {})
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = load_model(target, device="cpu", native="off")
    try:
        with torch.inference_mode():
            logits = theirs(ids).logits  # decompresses at the first call
        for module, layer in loaded.model.named_modules():
            if isinstance(layer, QuantizedLinear):
                weight = theirs.get_submodule(module).weight.float()
                torch.testing.assert_close(layer.quantized.dequantize(), weight)
        assert torch.isfinite(logits).all()
    finally:
        loaded.close()


def test_layers_that_groups_do_not_divide_stay(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "coded"
    options = QuantizeOptions(method="int4", group_size=64)
    reports = quantize_checkpoint(checkpoint("llama"), target, options, silent)
    kept = [report.name for report in reports if report.kept]
    assert kept == [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    tree = json.loads((target / "config.json").read_text())
    assert tree["quantization_config"]["ignore"] == ["lm_head", *kept]
    load_model(target, device="cpu", native="off").close()


def test_activations_choose_better_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 64, generator=generator)
    weight[:, 3] *= 6
    inputs = torch.randn(200, 64, generator=generator)
    inputs[:, 3] *= 0.01
    form = quantize_int4(weight, group_size=32)
    searched = search_scales(form, weight, inputs.square().mean(0), torch.float32)
    errors = [
        float((inputs @ (found.dequantize() - weight).T).norm()) for found in (form, searched)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_verify_compares_with_the_full_model(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 2)
    target = tmp_path / "coded"
    quantize_checkpoint(checkpoint("llama"), target, OPTIONS["int8"], silent)
    options = VerifyOptions(
        model=str(target), full=checkpoint("llama"), prompts_count=2, max_tokens=4, context=32,
        text_file=text, device="cpu", kv_cache_dtype="int8",
    )  # fmt: skip
    report = verify_model(options)
    assert report.ok, report.failed
    assert report.figures["kv_int8_token_agreement"] > 0.8
    assert abs(report.figures["kv_int8_perplexity_ratio"] - 1) < 0.1
    assert report.figures["kv_int8_median_rel_logit_diff"] > report.figures["max_rel_logit_diff"]
    assert report.figures["token_agreement_with_full"] > 0.8
    assert abs(report.figures["perplexity_ratio_to_full"] - 1) < 0.2
    assert report.figures["perplexity_full"] != report.figures["perplexity"]


def test_bad_input(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    full, target = checkpoint("llama"), tmp_path / "coded"
    with pytest.raises(ConfigurationError, match=r"target: got '.*', which exists already; name"):
        quantize_checkpoint(full, tmp_path, OPTIONS["int8"], silent)
    quantize_checkpoint(full, target, OPTIONS["int8"], silent)
    with pytest.raises(
        UnsupportedModel, match=r"source: '.*' is quantised already \(compressed-tensors\); give"
    ):
        quantize_checkpoint(target, tmp_path / "again", OPTIONS["int8"], silent)
    with pytest.raises(ConfigurationError, match="no text in it has two tokens"):
        quantize_checkpoint(full, tmp_path / "other", QuantizeOptions(texts=("",)), silent)
    with pytest.raises(ConfigurationError, match="--group-size: got 7, which divides the inputs"):
        quantize_checkpoint(full, tmp_path / "other", QuantizeOptions(group_size=7), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coded"]


def test_files_of_other_weights_are_neither_counted_nor_copied(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """As Mistral has all weights once more in consolidated.safetensors."""
    folder = tmp_path / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    shutil.copytree(checkpoint("llama"), folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    kept = {"LICENSE": b"", "tokenizer.model": b""}
    others = {f"model.{end}": b"" for end in ("pth", "onnx", "h5", "msgpack", "bin.index.json")}
    alone = loaded_bytes(folder, torch.float32)
    for name, data in (kept | others | {"consolidated.safetensors": weights}).items():
        (folder / name).write_bytes(data)
    assert loaded_bytes(folder, torch.float32) == alone
    assert plan_memory(folder).stored_bytes < 1.1 * alone
    target = tmp_path / "copy"
    quantize_checkpoint(folder, target, OPTIONS["int8"], silent)
    found = {path.name for path in target.iterdir()}
    assert found == {path.name for path in folder.iterdir()} - {"consolidated.safetensors", *others}
    assert len(StoredTensors(target).files()) > 2
    load_model(target, device="cpu", native="off").close()


@pytest.mark.parametrize("name", ["int8", "int8-scaled"])
def test_a_weight_that_is_not_finite_is_named(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "model")
    file, layer = tmp_path / "model/model.safetensors", "model.layers.2.mlp.down_proj"
    tensors = load_file(file)
    tensors[f"{layer}.weight"][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"{file}: tensor '{layer}.weight' is unusable: .* finite"
    ):
        quantize_checkpoint(tmp_path / "model", tmp_path / "new", OPTIONS[name], silent)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=100)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModel, match=r"\(model type t5\) is not supported: its linear"):
        quantize_checkpoint(tmp_path / "t5", tmp_path / "new", OPTIONS["int8"], silent)


def test_a_target_that_cannot_be_written(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"target: '.*' cannot be written \(.*\); make"):
        quantize_checkpoint(checkpoint("llama"), tmp_path / "file/new", OPTIONS["int8"], silent)


def test_a_source_whose_weights_are_in_other_files(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for path in checkpoint("llama").iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UnsupportedModel, match=r"source: '.*' has no \*\.safetensors, which alone"):
        quantize_checkpoint(tmp_path, tmp_path / "new", OPTIONS["int8"], silent)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "q4"], "error: --method: got 'q4'; allowed: int4, int8, fp8"),
        (["--method", "int8", "--group-size", "32"], "error: --group-size: got 32 with --method"),
        (["--method", "fp8", "--asymmetric"], "error: --asymmetric: got True with --method fp8"),
        (["--texts", "empty.txt"], "error: --texts: empty.txt has no text; give a file"),
        (["--texts", "none.txt"], "error: --texts: none.txt cannot be read"),
        (["--scale-channels"], "error: --scale-channels: got True without --texts, whose"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    assert main(["quantize", "demo", "new", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(says)
    assert told.count("\n") == 1
    assert not (tmp_path / "new").exists()

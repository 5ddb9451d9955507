"""Scaled channels: a model computes the same, and its weights are rounded with less error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.families import SUPPORTED, others_slow
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.gpu_worker.model.checkpoints.channel_scaling import ChannelScaling, scale_channels
from penstock.gpu_worker.model.checkpoints.checkpoint_quantizer import (
    LayerReport,
    QuantizeOptions,
    quantize_checkpoint,
)
from penstock.gpu_worker.model.checkpoints.scale_folding import Fold, find_folds
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.quantization.channel_scales import channel_scales
from penstock.gpu_worker.model.quantization.form import QuantizedWeight
from penstock.gpu_worker.model.quantization.formats.stored_tensors import StoredTensors
from penstock.gpu_worker.model.quantization.quantizers import quantize_int4
from penstock.gpu_worker.model.quantization.scale_search import Activations
from penstock.producer.cli import main

NORMS = {"input_layernorm", "post_attention_layernorm"}
FOLDED = {
    "llama": {*NORMS, "v_proj", "up_proj"},
    "gemma2": {"input_layernorm", "pre_feedforward_layernorm", "v_proj", "up_proj"},
    "phi3": NORMS,
    "opt": {"self_attn_layer_norm", "final_layer_norm", "v_proj", "fc1"},
    "mixtral": {"input_layernorm", "v_proj"},
}
"""Models of each kind: plain, norms of 1 + weight, fused, with biases, with experts."""

IDS = [5, 250, 6, 91, 7, 120, 8, 33, 200, 41]


def opened(path: Path) -> tuple[Any, list[str]]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval().requires_grad_(requires_grad=False)
    head = model.get_output_embeddings()
    linears = (n for n, m in model.named_modules() if type(m) is nn.Linear and m is not head)
    return model, list(linears)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([IDS])).logits
    return found


def round_to_int4(weight: torch.Tensor, _: torch.dtype, __: torch.Tensor) -> QuantizedWeight:
    return quantize_int4(weight, group_size=0)


def with_outliers(source: Path, target: Path) -> Path:
    """A copy that computes the same, of whose normed channels one is 64 times as large."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"][layer] *= 64
        tensors[f"{prefix}.post_attention_layernorm.weight"][layer] *= 64
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            tensors[f"{prefix}.{name}_proj.weight"][:, layer] /= 64
    save_file(tensors, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("family", others_slow(SUPPORTED, FOLDED.keys()))
def test_a_model_computes_the_same_with_scaled_channels(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    model, names = opened(checkpoint(family))
    expected = logits_of(model)
    folds, reasons = find_folds(model, names, IDS)
    readers = {name for fold in folds for name in fold.readers}
    assert readers.isdisjoint(reasons)
    assert readers | reasons.keys() == set(names)
    if family in FOLDED:
        assert {fold.source.rpartition(".")[2] for fold in folds} == FOLDED[family]
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)

    # Inputs as uneven as these have every fold choose scales, far from 1.
    tensors, generator = StoredTensors(checkpoint(family)), torch.Generator().manual_seed(0)
    rows, squares = {}, {}
    for fold in folds:
        inputs = model.get_submodule(fold.readers[0]).in_features
        uneven = torch.randn(64, inputs, generator=generator)
        uneven *= 10 ** torch.randn(inputs, generator=generator)
        rows[fold.readers[0]] = uneven
        squares |= dict.fromkeys(fold.readers, uneven.square().mean(0))
    rounding = dict.fromkeys(names, round_to_int4)
    scaling = scale_channels(folds, tensors, Activations(squares, rows), rounding)
    state = model.state_dict()
    scaled = {name: scaling.applied(name, state[name]) for name in tensors.names if name in state}
    assert sum(not torch.equal(scaled[name], state[name]) for name in scaled) >= 2 * len(folds)
    model.load_state_dict(scaled, strict=False)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("offset", [0, 1])
def test_rounding_of_a_norm_is_made_up_for(offset: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = (torch.randn(64, generator=generator) - offset).bfloat16()
    weight = torch.randn(8, 64, generator=generator).bfloat16()
    norm[3] = -offset  # a channel that is always zero
    save_file({"norm.weight": norm, "layer.weight": weight}, tmp_path / "model.safetensors")
    rows = torch.randn(32, 64, generator=generator)
    rows *= 10 ** torch.randn(64, generator=generator)
    scaling = scale_channels(
        [Fold("norm", ("layer",), offset=offset, width=64)],
        StoredTensors(tmp_path),
        Activations({"layer": rows.square().mean(0)}, {"layer": rows}),
        {"layer": round_to_int4},
    )
    layer = scaling.layers["layer"]
    assert layer.alpha > 0
    assert layer.after < layer.before
    changed = scaling.applied("norm.weight", norm)
    assert changed.dtype == torch.bfloat16
    assert not torch.equal(changed, norm)
    found = scaling.applied("layer.weight", weight) * (changed.float() + offset)
    torch.testing.assert_close(found, weight.float() * (norm.float() + offset))


def test_scales_of_inputs() -> None:
    scales = channel_scales(torch.tensor([1.0, 4.0, 0.0]), 0.5)
    assert scales[1] == pytest.approx(2 * scales[0])
    assert scales.max() * scales.min() == pytest.approx(1)
    assert torch.equal(channel_scales(torch.tensor([1.0, 4.0]), 0.0), torch.ones(2))
    assert torch.equal(channel_scales(torch.zeros(3), 0.5), torch.ones(3))
    tensor = torch.ones(2, 2)
    assert ChannelScaling().applied("layer.weight", tensor) is tensor


def test_outliers_lose_their_errors(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = with_outliers(checkpoint("llama"), tmp_path / "full")
    texts = ("the quick brown fox jumps over the lazy dog", "0123456789 abcdefgh")
    reports: dict[bool, dict[str, LayerReport]] = {}
    for scaled in (False, True):
        options = QuantizeOptions(group_size=32, texts=texts, scale_channels=scaled)
        found = quantize_checkpoint(source, tmp_path / f"coded-{scaled}", options, lambda *_: None)
        reports[scaled] = {report.name: report for report in found}
    assert all(report.alpha is None for report in reports[False].values())
    for name, report in reports[True].items():
        assert report.alpha is not None
        assert report.outputs_unscaled is not None
        assert report.outputs_error is not None
        assert not report.unscaled
        if name.endswith(("q_proj", "up_proj")):
            assert report.alpha > 0
            assert report.outputs_error < 0.8 * report.outputs_unscaled

    full, _ = opened(source)
    differences = []
    for scaled in (False, True):
        coded, _ = opened(tmp_path / f"coded-{scaled}")
        differences.append(float((logits_of(coded) - logits_of(full)).norm()))
    assert differences[1] < 0.8 * differences[0]


def test_what_is_not_scaled_is_said(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = QuantizeOptions(group_size=32, texts=("abc def",), scale_channels=True)
    reports = quantize_checkpoint(checkpoint("phi3"), tmp_path / "new", options, lambda *_: None)
    unscaled = {report.name.rpartition(".")[2]: report.unscaled for report in reports}
    assert unscaled == {
        "qkv_proj": "",
        "gate_up_proj": "",
        "o_proj": "nothing before it has a weight for each of its inputs",
        "down_proj": "nothing before it has a weight for each of its inputs",
    }
    load_model(tmp_path / "new", device="cpu", native="off").close()


def test_the_table_has_exponents(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "200")
    texts = tmp_path / "texts"
    texts.write_text("abc def\n")
    arguments = ["quantize", str(checkpoint("phi3")), str(tmp_path / "new"), "--group-size", "32"]
    assert main([*arguments, "--texts", str(texts), "--scale-channels"]) == 0
    told = capsys.readouterr().out
    assert "outputs unscaled" in told
    assert told.count("not scaled: nothing before it has a weight") == 6

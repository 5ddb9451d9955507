"""Prepacked linear layers: the same logits, in every family, and a way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.gpu_worker.model.loading import prepack
from penstock.gpu_worker.model.loading.load_gate import trial_logits
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.loading.prepack import PackedLinear, prepack_linears

Checkpoint = Callable[[str], Path]

PLENTY = 1 << 30


@pytest.fixture
def pack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of every size: those of tiny models would all stay plain."""
    monkeypatch.setattr(prepack, "LEAST_WEIGHTS", {torch.float32: 0, torch.bfloat16: 0})


def packed_layers(model: LoadedModel) -> list[PackedLinear]:
    return [layer for layer in model.model.modules() if isinstance(layer, PackedLinear)]


def logits_of(model: LoadedModel) -> Tensor:
    return trial_logits(model.model, model.context, model.geometry, model.vocab_size)


@pytest.mark.usefixtures("pack_all")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3"])
def test_float32_logits_stay_the_same(checkpoint: Checkpoint, model_type: str) -> None:
    plain = load_model(checkpoint(model_type), device="cpu", native="off", prepack=False)
    packed = load_model(checkpoint(model_type), device="cpu", native="off")
    assert not packed_layers(plain)
    assert packed_layers(packed)
    before, after = logits_of(plain), logits_of(packed)
    assert float((after - before).abs().max() / before.abs().max()) <= 1e-5


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_bfloat16_logits_stay_the_same(checkpoint: Checkpoint, model_type: str) -> None:
    plain = load_model(
        checkpoint(model_type), device="cpu", dtype="bfloat16", native="off", prepack=False
    )
    packed = load_model(checkpoint(model_type), device="cpu", dtype="bfloat16", native="off")
    assert packed_layers(packed)
    torch.testing.assert_close(logits_of(packed), logits_of(plain), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 300])
def test_one_layer(rows: int, bias: bool) -> None:
    layer = nn.Linear(1024, 1024, bias=bias).requires_grad_(False)
    model = nn.Sequential(layer)
    x = torch.randn(1, rows, 1024)
    expected = layer(x)
    assert prepack_linears(model, lambda: model(x), PLENTY) == 1
    assert model[0].weight.is_mkldnn
    assert model[0].weight.shape == (1024, 1024)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_small_layers_stay_plain() -> None:
    model = nn.Sequential(nn.Linear(512, 192)).requires_grad_(False)
    assert prepack_linears(model, lambda: model(torch.ones(1, 512)), PLENTY) == 0
    assert type(model[0]) is nn.Linear


def tied() -> tuple[nn.ModuleDict, Callable[[], Tensor]]:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(1024, 1024), "head": nn.Linear(1024, 1024, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    model.requires_grad_(False)
    return model, lambda: model["head"](model["embedding"](torch.arange(9)))


def test_tied_weights_stay_with_the_embedding_and_count_as_extra_memory() -> None:
    model, trial = tied()
    assert prepack_linears(model, trial, model["head"].weight.nbytes - 1) == 0
    assert type(model["head"]) is nn.Linear
    assert prepack_linears(model, trial, model["head"].weight.nbytes) == 1
    assert model["head"].weight.data_ptr() == model["embedding"].weight.data_ptr()


class ReachesIn(nn.Module):
    """A family that multiplies by a layer's weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1024, 1024)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight) + self.inner(x)


@pytest.mark.usefixtures("pack_all")
def test_a_model_that_reaches_into_its_weights_is_left_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = ReachesIn(), torch.randn(3, 1024)
    before, weight = model(x), model.inner.weight.clone()
    assert prepack_linears(model, lambda: model(x), PLENTY) == 0
    assert type(model.inner) is nn.Linear
    assert torch.equal(model.inner.weight, weight)
    assert torch.equal(model(x), before)
    assert "stay unpacked, which is slower but right" in caplog.text


def test_a_wrong_product_is_noticed_and_undone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_ones(*x.shape[:-1], 1100))
    model, x = nn.Sequential(nn.Linear(1024, 1100)).requires_grad_(False), torch.randn(2, 1024)
    before = model(x)
    assert prepack_linears(model, lambda: model(x), PLENTY) == 0
    assert torch.equal(model(x), before)
    assert "logits differ by" in caplog.text


def test_without_the_operators_nothing_happens(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepack, "_operator", lambda name: None)
    model = load_model(checkpoint("llama"), device="cpu")
    assert not packed_layers(model)


def test_only_plain_linear_layers_are_taken() -> None:
    class Adapted(nn.Linear):
        pass

    model = nn.Sequential(Adapted(1024, 1024), nn.Linear(1024, 1024, dtype=torch.float64))
    model.requires_grad_(False)
    assert prepack_linears(model, lambda: torch.ones(1), PLENTY) == 0

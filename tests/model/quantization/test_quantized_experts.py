"""Experts quantised at load: computed as by transformers over their dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.gpu_worker.model.forward.batch import Rows, SequenceChunk, pack
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.quantization.quantized_modules import QuantizedStack
from penstock.gpu_worker.model.quantization.recipe import Recipe, quantize_model
from penstock.kernels.cpu import NativeUnavailable, load_library
from penstock.shared.errors import ModelError
from penstock.tools.verify.hf_reference import load_by_transformers

RECIPES = [
    Recipe("int8"),
    Recipe("int4", group_size=32),
    Recipe("int4", group_size=16, symmetric=False),
    Recipe("nf4", group_size=32),
    Recipe("fp8"),
]
IDS = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def has_native() -> bool:
    try:
        load_library()
    except NativeUnavailable:
        return False
    return True


needs_native = pytest.mark.skipif(not has_native(), reason="no native library")


@torch.inference_mode()
def logits(loaded: LoadedModel) -> Tensor:
    pool = KVPool(loaded.geometry, 4, 16, loaded.device, loaded.dtype)
    chunk = SequenceChunk(IDS, 0, [[2, 0, 3]], Rows.ALL)
    return loaded.forward(pack([chunk], pool), pool).float()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def reference(path: Path, recipe: Recipe) -> Tensor:
    """Of transformers over plain parameters."""
    model = load_by_transformers(path, torch.float32, torch.device("cpu"), recipe)
    return model.logits(IDS)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[2]], ids=str)
def test_torch_reads_experts_one_by_one(
    family: str, recipe: Recipe, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(family)
    expected = reference(path, recipe)
    loaded = load_model(path, device="cpu", native="off", recipe=recipe)
    stacks = [
        (name, value)
        for name, module in loaded.model.named_modules()
        for value in vars(module).values()
        if isinstance(value, QuantizedStack)
    ]
    assert len(stacks) == 2 * (2 if family == "deepseek_v3" else 3)
    assert all(parameter.dim() < 3 for parameter in loaded.model.parameters())
    assert relative(logits(loaded), expected) < 1e-5
    assert relative(expected, reference(path, Recipe())) > 1e-3
    loaded.close()


@needs_native
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_native_steps_compute_with_coded_experts(
    family: str, recipe: Recipe, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(family)
    native = load_model(path, device="cpu", native="on", recipe=recipe)
    full = load_model(path, device="cpu", native="on")
    assert relative(logits(native), reference(path, recipe)) < 1e-5
    assert native.multiplied_weights == full.multiplied_weights
    # The gate compares with torch in bfloat16, too; rounding sends some rows to other experts.
    half = load_model(path, device="cpu", dtype="bfloat16", native="on", recipe=recipe)
    assert logits(half).isfinite().all()
    for loaded in (native, full, half):
        loaded.close()


def test_experts_can_be_kept(checkpoint: Callable[[str], Path]) -> None:
    recipe = Recipe("int8", keep=("*.experts.down_proj",))
    loaded = load_model(checkpoint("mixtral"), device="cpu", native="off", recipe=recipe)
    experts = loaded.model.model.layers[0].mlp.experts
    assert isinstance(experts.down_proj, nn.Parameter)
    assert isinstance(experts.gate_up_proj, QuantizedStack)
    assert relative(logits(loaded), reference(checkpoint("mixtral"), recipe)) < 1e-5
    loaded.close()


class Together(nn.Module):
    """Experts that are multiplied all at once."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = type("Config", (), {"_experts_implementation": "grouped_mm"})()
        self.up = nn.Parameter(torch.ones(3, 4, 8), requires_grad=False)

    def forward(self, rows: Tensor, _chosen: Tensor, _weights: Tensor) -> Tensor:
        return torch.bmm(rows.expand(3, -1, -1), self.up)


class Model(nn.Module):
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.experts = Together()


def test_experts_that_are_not_read_one_by_one_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level("WARNING"):
        assert quantize_model(model, Recipe("int8")) == 0
    assert "experts stays in full, its forward needs whole parameters" in caplog.text
    assert torch.equal(model.experts.up, torch.ones(3, 4, 8))
    assert model.experts.config._experts_implementation == "grouped_mm"


def test_experts_that_are_not_finite_are_named() -> None:
    model = Model()
    model.experts.up[1, 2, 3] = torch.nan
    with pytest.raises(ModelError, match=r"experts\.up: .* not finite"):
        quantize_model(model, Recipe("int4"))

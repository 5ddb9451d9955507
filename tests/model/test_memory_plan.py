"""``penstock plan``: counted without weights, and the same as with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model.families import save_family

from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
from penstock.gpu_worker.model.loading.loader import load_model
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
    names = [plan.name for plan in whole.formats]
    sizes = [plan.weight_bytes for plan in whole.formats]
    assert names == ["float32", "bfloat16", "int8", "int4"]
    assert sizes == sorted(sizes, reverse=True)
    assert whole.first_fit == "float32"
    bfloat16 = whole.formats[1]
    needed = bfloat16.weight_bytes + 16 * bfloat16.token_bytes
    tight = plan_memory(folder, context=16, memory_bytes=int(needed / 0.9) + 2)
    assert tight.first_fit == "bfloat16"
    assert tight.formats[1].sequences == 1
    assert tight.formats[0].missing_bytes > 0
    assert plan_memory(folder, context=16, memory_bytes=1).first_fit is None


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "1GiB", "--context", "100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["context"], facts["first_fit"]) == (100, "float32")
    assert main(["plan", "--memory", "1MiB"]) == 1
    assert "it fits in none" in capsys.readouterr().out
    assert main(["plan", "--memory", "much"]) == 2
    assert "memory size: got 'much'" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound):
        plan_memory("/nowhere")

"""Weights that are sharded, tied, renamed, missing or pickled: they load, or are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.checkpoints.greedy_tokens import expected_greedy, tokens_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.shared.errors import InsufficientMemory, ModelError, ModelNotFound

Checkpoint = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def bare(checkpoint: Checkpoint, tmp_path: Path) -> tuple[Path, Tensors]:
    """A folder with all files of a Llama checkpoint but its weights, and these."""
    source = checkpoint("llama")
    shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "bare", load_file(source / "model.safetensors")


def refuse(folder: Path, *words: str, error: type[ModelError] = ModelError) -> None:
    with pytest.raises(error) as refused:
        load_model(folder, device="cpu")
    text = str(refused.value)
    assert type(refused.value) is error, text
    for word in words:
        assert word in text
    assert len(text) < 1000
    assert "\n" not in text


@pytest.mark.parametrize("form", ["pytorch_model.bin", "model.pt", "nested.pth"])
def test_files_of_torch_load_by_their_tensors(
    form: str, bare: tuple[Path, Tensors], checkpoint: Checkpoint
) -> None:
    folder, tensors = bare
    tree: Any = tensors
    if form == "nested.pth":
        tree = {"epoch": 3, "state_dict": {f"module.{n}": t for n, t in tensors.items()}}
    torch.save(tree, folder / form)
    assert tokens_of(folder) == expected_greedy(checkpoint("llama"))
    assert plan_memory(folder).stored_bytes == (folder / form).stat().st_size


class _Touch:
    """Executed, its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


@pytest.mark.parametrize("form", ["pytorch_model.bin", "model.pt"])
def test_no_pickle_is_executed(form: str, bare: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder, tensors = bare
    torch.save({**tensors, "more": _Touch(tmp_path / "executed")}, folder / form)
    refuse(folder, "bare")
    assert not (tmp_path / "executed").exists()


def test_a_damaged_file_of_torch(bare: tuple[Path, Tensors]) -> None:
    folder, tensors = bare
    torch.save(tensors, folder / "model.pt")
    data = (folder / "model.pt").read_bytes()
    for kept in (0, 100, len(data) // 2):
        (folder / "model.pt").write_bytes(data[:kept])
        refuse(folder, "model.pt cannot be read as tensors alone", "no pickle is executed")
    torch.save({"a": tensors, "b": tensors}, folder / "model.pt")
    refuse(folder, "model.pt holds no state dict, or several")
    torch.save(tensors, folder / "second.pt")
    refuse(folder, "has 2 files of weights (model.pt, second.pt); keep the one")


def test_renamed_and_missing_tensors_of_a_state_dict(bare: tuple[Path, Tensors]) -> None:
    folder, tensors = bare
    tensors["model.layers.1.mlp.w3.weight"] = tensors.pop(UP)
    torch.save(tensors, folder / "model.pt")
    refuse(
        folder, f"model.pt lacks 1 weights ({UP})",
        "it has 1 of unknown names (model.layers.1.mlp.w3.weight)", "state_dict()",
    )  # fmt: skip


def test_renamed_tensors_of_safetensors(bare: tuple[Path, Tensors]) -> None:
    folder, tensors = bare
    tensors["model.layers.1.mlp.w3.weight"] = tensors.pop(UP)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, f"lacks 1 weights ({UP})", "1 of unknown names (model.layers.1.mlp.w3.weight)")


def test_a_tensor_of_another_shape_is_named(bare: tuple[Path, Tensors]) -> None:
    folder, tensors = bare
    tensors[UP] = tensors[UP][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, f"such as '{UP}' with [95, 64] instead of [96, 64]", "config.json")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "model.pt")
    refuse(folder, "model.pt", f"{UP!r} is unusable: its shape is [95, 64], expected: [96, 64]")


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_weights_load_and_a_missing_shard_is_named(
    safe: bool, checkpoint: Checkpoint, bare: tuple[Path, Tensors]
) -> None:
    folder, tensors = bare
    end, save = ("safetensors", save_file) if safe else ("bin", torch.save)
    stem = "model" if safe else "pytorch_model"
    places = {}
    for index in range(2):
        file = f"{stem}-0000{index + 1}-of-00002.{end}"
        part = dict(sorted(tensors.items())[index::2])
        save(part, folder / file, **({"metadata": {"format": "pt"}} if safe else {}))
        places |= dict.fromkeys(part, file)
    index_file = folder / f"{stem}.{end}.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert tokens_of(folder) == expected_greedy(checkpoint("llama"))
    (folder / f"{stem}-00002-of-00002.{end}").unlink()
    refuse(folder, f"{stem}-00002-of-00002.{end}", error=ModelNotFound)


def test_a_damaged_shard_is_named(bare: tuple[Path, Tensors]) -> None:
    folder, tensors = bare
    places = {}
    for index in range(2):
        file = f"model-0000{index + 1}-of-00002.safetensors"
        part = dict(sorted(tensors.items())[index::2])
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    refuse(folder, "a weights file in", "is damaged (model-00002-of-00002.safetensors: ")


@pytest.mark.parametrize("kept", ["transformer.wte.weight", "lm_head.weight"])
def test_either_name_of_a_tied_weight_is_enough(
    kept: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, folder = checkpoint("gpt2"), tmp_path / "tied"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(source)
    tensors = {**model.state_dict()}
    for name in {"transformer.wte.weight", "lm_head.weight"} - {kept}:
        del tensors[name]
    torch.save(tensors, folder / "model.pt")
    assert tokens_of(folder) == expected_greedy(source)
    del tensors[kept]
    torch.save(tensors, folder / "model.pt")
    refuse(folder, "lacks 1 weights (transformer.wte.weight)")


def test_weights_that_do_not_fit_are_counted_by_the_configuration(
    bare: tuple[Path, Tensors],
) -> None:
    folder, tensors = bare
    torch.save(tensors, folder / "model.pt")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "head_dim": 1 << 15}
    (folder / "config.json").write_text(json.dumps(config))
    refuse(folder, "take ", " are missing; use a smaller dtype", error=InsufficientMemory)

"""Decoders in ONNX give transformers' tokens; files that cannot be used are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from model.checkpoints.greedy_tokens import expected_greedy, tokens_of
from model.checkpoints.onnx_writer import NAMES, write_onnx
from onnx import TensorProto, helper

from penstock.gpu_worker.model.checkpoints.memory_plan import plan_memory
from penstock.gpu_worker.model.loading.fingerprint import fingerprint_of
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.shared.errors import ModelError, UnsupportedModel

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, tmp_path: Path, family: str, names: str
) -> None:
    folder = write_onnx(checkpoint(family), tmp_path / "onnx", names)
    assert tokens_of(folder) == expected_greedy(checkpoint(family))


def test_weights_beside_the_file_under_a_wrappers_names(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = write_onnx(
        checkpoint("qwen2"), tmp_path / "onnx", "tracing", external="weights", prefix="inner."
    )
    assert tokens_of(folder) == expected_greedy(checkpoint("qwen2"))
    assert plan_memory(folder).stored_bytes > plan_memory(folder).parameters * 4
    before = fingerprint_of(folder, "float32")
    data = bytearray((folder / "weights").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "weights").write_bytes(data)
    assert fingerprint_of(folder, "float32") != before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx", "dynamo", dtype=dtype)
    loaded = load_model(folder, device="cpu", native="off")
    try:
        original = load_model(checkpoint("llama"), device="cpu", native="off")
        for name, weight in original.model.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[name], weight.to(dtype).float())
        original.close()
    finally:
        loaded.close()


def _tensor(model: Any, name: str) -> Any:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _place(model: Any, key: str, value: str) -> None:
    entries = _tensor(model, NAME).external_data
    next(entry for entry in entries if entry.key == key).value = value


NAME = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "shape": (
        lambda m: _tensor(m, NAME).dims.__setitem__(0, 95),
        "",
        r"its shape is \[95, 64\], expected: \[96, 64\] by config\.json",
    ),
    "short": (
        lambda m: setattr(_tensor(m, NAME), "raw_data", b"1234"),
        "",
        r"its shape \[96, 64\] needs 24576 bytes, it has 4",
    ),
    "type": (
        lambda m: setattr(_tensor(m, NAME), "data_type", TensorProto.INT8),
        "",
        "has ONNX's data type 3; served: float32, float16",
    ),
    "parent": (lambda m: _place(m, "location", "../w"), "w", r"'../w' is not in the model's fold"),
    "absolute": (lambda m: _place(m, "location", "/etc/passwd"), "w", "'/etc/passwd' is not in"),
    "link": (lambda m: _place(m, "location", "link"), "w", "'link' is not in the model's folder"),
    "nowhere": (lambda m: _place(m, "location", ""), "w", "'' is not in the model's folder"),
    "absent": (lambda m: _place(m, "location", "other"), "w", "its file 'other' is missing"),
    "zero byte": (lambda m: _place(m, "location", "a\0b"), "w", "cannot be opened"),
    "2 GB": (lambda m: _place(m, "length", "2147483648"), "w", "it is 2147483648 bytes from"),
    "before": (lambda m: _place(m, "offset", "-8"), "w", "bytes from -8 of"),
    "words": (lambda m: _place(m, "offset", "many"), "w", "offset or length is no number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_cannot_be_used_is_named(
    checkpoint: Checkpoint, tmp_path: Path, fault: str
) -> None:
    change, external, words = FAULTS[fault]
    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx", external=external, change=change)
    (tmp_path / "w").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "w")
    with pytest.raises(ModelError, match=words) as refused:
        load_model(folder, device="cpu")
    assert NAME in str(refused.value)
    assert "model.onnx" in str(refused.value)


def test_external_data_that_is_cut_short(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx", external="model.onnx_data")
    data = (folder / "model.onnx_data").read_bytes()
    (folder / "model.onnx_data").write_bytes(data[:-1])
    with pytest.raises(ModelError, match=r"tensor '.*' is unusable: .*model\.onnx_data, which has"):
        load_model(folder, device="cpu")


def test_a_file_that_is_cut_short(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx")
    data = (folder / "model.onnx").read_bytes()
    for kept in (1, 1000, len(data) // 2, len(data) - 1):
        (folder / "model.onnx").write_bytes(data[:kept])
        with pytest.raises(ModelError, match=r"model\.onnx"):
            load_model(folder, device="cpu")
    # A kilobyte that says its graph (field 7) has 2 GB less one byte.
    (folder / "model.onnx").write_bytes(b"\x3a\xff\xff\xff\xff\x07" + bytes(1000))
    with pytest.raises(ModelError, match=r"model\.onnx is damaged"):
        load_model(folder, device="cpu")
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.onnx lacks 30 weights \(lm_head\.weight, "):
        load_model(folder, device="cpu")


def test_names_that_are_lost_are_said_with_a_remedy(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def without_places(model: Any) -> None:
        for node in model.graph.node:
            node.name = ""

    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx", "tracing", change=without_places)
    with pytest.raises(ModelError) as refused:
        load_model(folder, device="cpu")
    text = str(refused.value)
    assert "lacks 22 weights (lm_head.weight, model.layers.0.mlp.down_proj.weight" in text
    assert "it has 22 of unknown names (onnx::MatMul_" in text
    assert "by torch.onnx.export or optimum, and keep the nodes' names" in text


def test_quantised_graphs_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def quantise(model: Any) -> None:
        model.graph.node.append(helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"]))

    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx", change=quantise)
    with pytest.raises(UnsupportedModel, match=r"quantised weights \(MatMulNBits\); served"):
        load_model(folder, device="cpu")


def test_the_file_is_chosen_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx")
    shutil.copy(folder / "model.onnx", folder / "other.onnx")
    assert tokens_of(folder) == expected_greedy(checkpoint("llama"))
    (folder / "model.onnx").rename(folder / "one.onnx")
    with pytest.raises(ModelError, match=r"has 2 files of weights \(one\.onnx, other\.onnx\)"):
        load_model(folder, device="cpu")


def test_a_branch_and_its_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def into_branch(model: Any) -> None:
        graph = model.graph
        inner = helper.make_graph(list(graph.node), "then", [], [])
        del graph.node[:]
        graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=inner))

    folder = write_onnx(checkpoint("llama"), tmp_path / "onnx", "tracing", change=into_branch)
    assert onnx.load(folder / "model.onnx").graph.node[0].op_type == "If"
    assert tokens_of(folder) == expected_greedy(checkpoint("llama"))

"""Packed weights beside a start-up record: later starts map them, and notice what is wrong."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.model.forward.batch import Rows, SequenceChunk, pack
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading import model_record
from penstock.gpu_worker.model.loading.checkpoint_folder import find_checkpoint
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.loading.model_opening import OpenedModel, open_model
from penstock.gpu_worker.model.loading.model_record import CheckpointWeights
from penstock.gpu_worker.model.program.native_decoder import NativeDecoder, NoRoomToPack
from penstock.gpu_worker.model.quantization.recipe import AUTO, Recipe
from penstock.kernels.cpu import NativeProgram, NativeUnavailable, WeightsFile, load_library

try:
    load_library()
except NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


def read_linears(names: list[str]) -> list[str]:
    """Those of linear layers; norms and the embedding are read at every start."""
    assert "model.embed_tokens.weight" in names
    return [name for name in names if "_proj" in name or "lm_head" in name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "model"
    shutil.copytree(find_checkpoint("demo-draft"), folder)
    return folder


@pytest.fixture
def started(checkpoint: Path, tmp_path: Path) -> Callable[..., OpenedModel]:
    """Opens the checkpoint as a worker does at each start, with records of the test's own."""

    def start(
        recipe: Recipe = AUTO, *, dtype: str = "float32", keep: bool = True, remember: bool = True
    ) -> OpenedModel:
        opened = open_model(
            checkpoint, dtype=dtype, native="on", recipe=recipe, cache=tmp_path, keep_packed=keep
        )
        if remember:
            opened.remember()
        return opened

    return start


@pytest.fixture
def tensors_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoint's tensors that are read from here on."""
    names: list[str] = []
    read = CheckpointWeights.read

    def watched(self: CheckpointWeights, name: str) -> Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(CheckpointWeights, "read", watched)
    return names


@torch.inference_mode()
def logits_of(loaded: LoadedModel) -> Tensor:
    ids = torch.randint(0, loaded.vocab_size, (40,), generator=torch.Generator().manual_seed(7))
    pool = KVPool(loaded.geometry, 4, 16, loaded.device, loaded.dtype)
    chunk = SequenceChunk(ids.tolist(), 0, [[2, 0, 3]], Rows.ALL)
    return loaded.forward(pack([chunk], pool), pool)


def packed_file(cache: Path) -> Path:
    (path,) = cache.glob("*/packed.weights")
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "recipe",
    [
        AUTO,
        Recipe("int8"),
        Recipe("int4", symmetric=False),
        Recipe("nf4"),
        Recipe("fp8", head="full"),
    ],
    ids=lambda recipe: recipe.method,
)
def test_a_later_start_reads_no_linear_layer_and_computes_the_same(
    started: Callable[..., OpenedModel], tensors_read: list[str], recipe: Recipe, dtype: str
) -> None:
    first = started(recipe, dtype=dtype)
    assert not first.is_known
    tensors_read.clear()
    second = started(recipe, dtype=dtype)
    assert second.is_known
    assert read_linears(tensors_read) == []
    assert torch.equal(logits_of(first.loaded), logits_of(second.loaded))
    native, known = first.loaded.native, second.loaded.native
    assert native is not None
    assert known is not None
    assert known.program.weight_bytes == native.program.weight_bytes
    assert known.multiplied_weights == native.multiplied_weights


def test_the_setting_decides_at_each_start(
    started: Callable[..., OpenedModel], tensors_read: list[str], tmp_path: Path
) -> None:
    started(keep=False)
    assert not list(tmp_path.glob("*/packed.weights"))
    assert started().is_known  # packs once more, and keeps that
    assert packed_file(tmp_path).is_file()
    tensors_read.clear()
    assert started(keep=False).is_known
    assert read_linears(tensors_read)
    tensors_read.clear()
    assert started().is_known
    assert read_linears(tensors_read) == []


def _shorter(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(64))


def _other_numbers(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x3f" * 4096)


@pytest.mark.parametrize("damage", [_shorter, _longer, _other_numbers])
def test_a_damaged_file_is_noticed_and_made_anew(
    started: Callable[..., OpenedModel],
    tmp_path: Path,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = logits_of(started().loaded)
    damage(packed_file(tmp_path))
    again = started()
    assert not again.is_known
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert torch.equal(logits_of(again.loaded), expected)
    assert started().is_known


def test_a_file_that_was_deleted_is_made_again(
    started: Callable[..., OpenedModel], tmp_path: Path
) -> None:
    started()
    packed_file(tmp_path).unlink()
    assert started().is_known
    assert packed_file(tmp_path).is_file()


def test_a_file_that_is_replaced_or_deleted_stays_what_it_was_to_those_who_mapped_it(
    started: Callable[..., OpenedModel], tmp_path: Path
) -> None:
    started()
    running = started()
    expected = logits_of(running.loaded)
    shutil.rmtree(packed_file(tmp_path).parent)
    assert torch.equal(logits_of(running.loaded), expected)


def test_weights_that_cannot_be_written_are_no_error(
    started: Callable[..., OpenedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = NativeProgram.write_weights

    def full(self: NativeProgram, path: Path) -> WeightsFile:
        del path
        return write(self, Path("/dev/full"))

    monkeypatch.setattr(NativeProgram, "write_weights", full)
    started()
    assert "packed weights are not kept: /dev/full: No space left on device" in caplog.text
    assert started().is_known
    assert not list(tmp_path.glob("*/packed.weights"))
    assert not list(tmp_path.glob(".new-*"))


def test_what_a_killed_writer_left_is_removed_and_what_one_writes_is_not(
    started: Callable[..., OpenedModel], tmp_path: Path
) -> None:
    left, written = tmp_path / ".new-left", tmp_path / ".new-written"
    for folder in (left, written):
        folder.mkdir()
    os.utime(left, (0, 0))
    started()
    assert not left.exists()
    assert written.exists()


def test_want_of_memory_deletes_nothing_that_others_use(
    started: Callable[..., OpenedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started()

    def no_room(*_: object) -> NativeDecoder:
        raise NoRoomToPack("no room")

    monkeypatch.setattr(NativeDecoder, "of_description", no_room)
    assert not started(remember=False).is_known
    monkeypatch.undo()
    assert packed_file(tmp_path).is_file()
    assert started().is_known


def test_few_models_keep_theirs(
    started: Callable[..., OpenedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_record, "_MOST_PACKED", 1)
    started()
    first = packed_file(tmp_path)
    started(Recipe("int8"))
    second = packed_file(tmp_path)
    assert second != first
    assert first.parent.stat().st_mtime <= second.parent.stat().st_mtime
    assert started().is_known
    assert packed_file(tmp_path) == first

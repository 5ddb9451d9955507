"""The fingerprint of a checkpoint changes with whatever decides the tokens."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from penstock.gpu_worker.model.loading.checkpoint import DEMO, find_checkpoint
from penstock.gpu_worker.model.loading.fingerprint import fingerprint_of

LARGE = 65 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_checkpoint(DEMO), tmp_path / "model"))


def test_a_copy_has_the_same_one(checkpoint: Path) -> None:
    before = fingerprint_of(find_checkpoint(DEMO), "float32")
    assert len(before) == 16
    assert fingerprint_of(checkpoint, "float32") == before
    (checkpoint / "README.md").write_text("not read by a worker")
    os.utime(checkpoint / "config.json", (1, 1))
    assert fingerprint_of(checkpoint, "float32") == before
    assert fingerprint_of(checkpoint, "bfloat16") != before


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "model.safetensors",
    ],
)  # fmt: skip
def test_one_byte_of_any_file_changes_it(checkpoint: Path, name: str) -> None:
    before = fingerprint_of(checkpoint, "float32")
    data = bytearray((checkpoint / name).read_bytes())
    data[-2] ^= 1
    (checkpoint / name).write_bytes(data)
    assert fingerprint_of(checkpoint, "float32") != before


def test_a_template_more_changes_it(checkpoint: Path) -> None:
    before = fingerprint_of(checkpoint, "float32")
    folder = checkpoint / "additional_chat_templates"
    folder.mkdir()
    (folder / "tools.jinja").write_text("{{ messages }}")
    assert fingerprint_of(checkpoint, "float32") != before


def large_weights(folder: Path) -> Path:
    """Two tensors in a sparse file that is too large to be hashed whole."""
    half = LARGE // 2
    tensors = {
        "a": {"dtype": "U8", "shape": [half], "data_offsets": [0, half]},
        "b": {"dtype": "U8", "shape": [half], "data_offsets": [half, 2 * half]},
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + 2 * half)
    return file


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as target:
        target.seek(at)
        target.write(data)


@pytest.mark.parametrize("part", [1, 3], ids=["first tensor", "second tensor"])
def test_each_tensor_of_a_large_file_is_sampled(tmp_path: Path, part: int) -> None:
    file = large_weights(tmp_path)
    before = fingerprint_of(tmp_path, "float32")
    overwrite(file, part * LARGE // 4, b"x" * 512)
    assert fingerprint_of(tmp_path, "float32") != before


def test_names_and_shapes_in_a_large_file_count(tmp_path: Path) -> None:
    file = large_weights(tmp_path)
    before = fingerprint_of(tmp_path, "float32")
    overwrite(file, file.read_bytes()[:200].index(b'"b"') + 1, b"c")
    assert fingerprint_of(tmp_path, "float32") != before


def test_large_files_without_a_header_are_sampled_evenly(tmp_path: Path) -> None:
    for start in (b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"\xff\xff{}"):
        file = tmp_path / "vocab.txt"
        file.write_bytes(start)
        os.truncate(file, LARGE)
        before = fingerprint_of(tmp_path, "float32")
        overwrite(file, LARGE // 2, b"x")
        assert fingerprint_of(tmp_path, "float32") != before

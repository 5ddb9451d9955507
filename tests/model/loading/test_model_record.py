"""A start from the record of an earlier one: the same model; what has changed is tried anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.gpu_worker.model.forward.batch import Rows, SequenceChunk, pack
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.checkpoint_folder import find_checkpoint
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.loading.model_opening import OpenedModel, open_model
from penstock.gpu_worker.model.text.deferred_tokenizer import DeferredTokenizer
from penstock.gpu_worker.model.text.fast_detokenize import decoder_of
from penstock.gpu_worker.model.text.prompt_tokenizer import encode_prompt
from penstock.kernels.cpu import NativeUnavailable, load_library

try:
    load_library()
except NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record") / "model"
    shutil.copytree(find_checkpoint("demo-draft"), folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def both(
    request: pytest.FixtureRequest, checkpoint: Path, cache: Path
) -> tuple[LoadedModel, LoadedModel]:
    """The model as the first start and as a later one has it."""
    first = open_model(checkpoint, dtype=request.param, native="on", cache=cache)
    assert not first.is_known
    first.remember()
    second = open_model(checkpoint, dtype=request.param, native="on", cache=cache)
    assert second.is_known
    return first.loaded, second.loaded


@torch.inference_mode()
def _logits(loaded: LoadedModel) -> torch.Tensor:
    ids = torch.randint(0, loaded.vocab_size, (40,), generator=torch.Generator().manual_seed(7))
    pool = KVPool(loaded.geometry, 4, 16, loaded.device, loaded.dtype)
    chunk = SequenceChunk(ids.tolist(), 0, [[2, 0, 3]], Rows.ALL)
    return loaded.forward(pack([chunk], pool), pool)


def test_same_logits_to_the_last_bit(both: tuple[LoadedModel, LoadedModel]) -> None:
    first, second = both
    assert torch.equal(_logits(first), _logits(second))


def test_same_facts(both: tuple[LoadedModel, LoadedModel]) -> None:
    first, second = both
    for name in ("model_type", "geometry", "max_model_len", "eos_token_ids", "vocab_size", "dtype"):
        assert getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "naïve 東京 <|end|>", " leading"])
def test_same_text_and_ids(both: tuple[LoadedModel, LoadedModel], text: str) -> None:
    first, second = both
    assert isinstance(second.tokenizer, DeferredTokenizer)
    ids = encode_prompt(first.tokenizer, text)
    assert encode_prompt(second.tokenizer, text) == ids
    words = [
        decoder_of(one.tokenizer).decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        for one in both
    ]
    assert words[0] == words[1]
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    assert len(first.tokenizer) == len(second.tokenizer)
    assert first.tokenizer.added_tokens_encoder == second.tokenizer.added_tokens_encoder


def test_chat_messages_are_rendered_by_the_checkpoints_template(
    both: tuple[LoadedModel, LoadedModel],
) -> None:
    # The second spells a control token, which takes a copy of the tokenizer.
    for content in ("Hello", "<|im_end|>"):
        first, second = (_chat_ids(one, content) for one in both)
        assert first == second


def _chat_ids(loaded: LoadedModel, content: str) -> list[int]:
    return encode_prompt(loaded.tokenizer, [{"role": "user", "content": content}])


def _opened(checkpoint: Path, cache: Path) -> OpenedModel:
    opened = open_model(checkpoint, dtype="float32", native="on", cache=cache)
    opened.remember()
    return opened


@pytest.fixture
def recorded(checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of one's own, and the cache that has its record."""
    mine, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(checkpoint, mine)
    _opened(mine, cache)
    assert _opened(mine, cache).is_known
    return mine, cache


def test_other_weights_under_the_same_time_are_tried_anew(recorded: tuple[Path, Path]) -> None:
    mine, cache = recorded
    path = mine / "model.safetensors"
    facts = path.stat()
    weights = load_file(path)
    weights["model.norm.weight"] *= 1.01
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size
    assert not _opened(mine, cache).is_known
    assert _opened(mine, cache).is_known


def test_another_configuration_is_another_record(recorded: tuple[Path, Path]) -> None:
    mine, cache = recorded
    with (mine / "config.json").open("a") as file:
        file.write("\n")
    assert not _opened(mine, cache).is_known


def test_a_damaged_record_is_left_aside(recorded: tuple[Path, Path]) -> None:
    mine, cache = recorded
    (record,) = cache.glob("*/record.json")
    record.write_text("{", encoding="utf-8")
    assert not _opened(mine, cache).is_known
    assert _opened(mine, cache).is_known


def test_no_record_where_none_is_wanted(checkpoint: Path, tmp_path: Path) -> None:
    opened = open_model(
        checkpoint, dtype="float32", native="on", cache=tmp_path / "cache", records=False
    )
    opened.remember()
    assert not (tmp_path / "cache").exists()


KNOWN_START = """\
import sys
from pathlib import Path
import penstock.gpu_worker.model.build
from penstock.gpu_worker.model.loading.model_opening import open_model
assert open_model(sys.argv[1], dtype="float32", native="on", cache=Path(sys.argv[2])).is_known
assert "transformers" not in sys.modules
"""


def test_a_known_model_starts_without_transformers(recorded: tuple[Path, Path]) -> None:
    """Its import takes a second of each start."""
    run = subprocess.run(
        [sys.executable, "-c", KNOWN_START, *map(str, recorded)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr

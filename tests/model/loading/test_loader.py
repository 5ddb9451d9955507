"""Loading: what a good checkpoint gives, and what every bad one is told."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model.families import VOCAB_SIZE, save_family
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.gpu_worker.model.loading import checkpoint as checkpoint_module
from penstock.gpu_worker.model.loading import loader as loader_module
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.loading.stored_sizes import loaded_bytes
from penstock.shared.errors import (
    ConfigurationError,
    InsufficientMemory,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)

Checkpoint = Callable[[str], Path]


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A Llama checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "checkpoint"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_what_a_loaded_model_says_of_itself(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("llama")
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert model.vocab_size == VOCAB_SIZE
    assert model.max_model_len == 256
    assert model.eos_token_ids == {VOCAB_SIZE - 1}
    assert model.tokenizer.decode(model.tokenizer("Grüße").input_ids) == "Grüße"
    assert not model.model.training
    assert not any(parameter.requires_grad for parameter in model.model.parameters())


def test_the_demo_model_loads() -> None:
    model = load_model("demo", device="cpu")
    assert len(model.tokenizer) <= model.vocab_size
    assert model.eos_token_ids
    assert model.load_seconds > 0
    model.close()


def test_half_precision_checkpoints_run_in_float32_on_cpu_unless_told(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    halved = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(halved, copy / "model.safetensors", metadata={"format": "pt"})
    edit_config(copy, dtype="bfloat16")
    assert load_model(copy, device="cpu").dtype == torch.float32
    model = load_model(copy, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("listed", [7, [7, 9]])
def test_eos_is_what_generate_stops_at(copy: Path, listed: int | list[int]) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    expected = {7} if listed == 7 else {7, 9}
    assert load_model(copy).eos_token_ids == expected


def test_eos_of_the_configuration_serves_without_a_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit_config(copy, eos_token_id=[2, 5])
    assert load_model(copy).eos_token_ids == {2, 5}


def test_the_context_can_be_shortened_and_not_lengthened(checkpoint: Checkpoint) -> None:
    assert load_model(checkpoint("llama"), max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigurationError, match=r"max_model_len: got 257; .*at most 256"):
        load_model(checkpoint("llama"), max_model_len=257)
    with pytest.raises(ConfigurationError, match=r"max_model_len: got 0"):
        load_model(checkpoint("llama"), max_model_len=0)


def test_models_in_one_process_do_not_meet(checkpoint: Checkpoint) -> None:
    one, two = load_model(checkpoint("llama")), load_model(checkpoint("qwen3"))
    assert one.attention_name != two.attention_name
    assert {one.attention_name, two.attention_name} <= set(ALL_ATTENTION_FUNCTIONS)
    one.close()
    one.close()
    assert one.attention_name not in ALL_ATTENTION_FUNCTIONS
    assert two.attention_name in ALL_ATTENTION_FUNCTIONS
    name = two.attention_name
    del two
    gc.collect()
    assert name not in ALL_ATTENTION_FUNCTIONS


def test_nothing_stays_registered_after_a_refusal(checkpoint: Checkpoint) -> None:
    before = set(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(UnsupportedModel):
        load_model(checkpoint("bloom"))
    assert set(ALL_ATTENTION_FUNCTIONS) == before


def test_a_model_cannot_run_outside_of_a_step(
    loaded_by_torch: Callable[[str], LoadedModel],
) -> None:
    with pytest.raises(RuntimeError, match="paged KV pool"):
        loaded_by_torch("llama").model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def refuse(folder: Path | str, error: type[ModelError], words: str) -> None:
    """Loading raises ``error`` itself, in one line that matches ``words``."""
    with pytest.raises(error, match=words) as caught:
        load_model(folder)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    refuse(tmp_path / "absent", ModelNotFound, r"absent' does not exist; give a directory")
    # The form of a hub name: still never looked up anywhere.
    refuse("no-such-owner/no-such-model", ModelNotFound, "never downloaded")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    refuse(file, ModelNotFound, "is a file; give a directory")


def test_an_empty_directory(tmp_path: Path) -> None:
    refuse(tmp_path, ModelNotFound, r"has no config\.json; give a directory")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{", ModelError, "config.json cannot be read: .*not a valid JSON.*copy the checkpoint"),
        ("[]", ModelError, "config.json cannot be read"),
        ("{}", ModelError, "config.json cannot be read: .*model_type"),
        ('{"model_type": "of-tomorrow"}', UnsupportedModel, "does not know"),
        ('{"model_type": "vit"}', UnsupportedModel, "no causal language model"),
    ],
)
def test_configurations_that_cannot_serve(
    copy: Path, text: str, error: type[ModelError], words: str
) -> None:
    (copy / "config.json").write_text(text)
    refuse(copy, error, words)


def test_code_of_a_checkpoint_is_not_run(copy: Path) -> None:
    (copy / "own.py").write_text("raise SystemExit('it was run')")
    edit_config(copy, model_type="own", auto_map={"AutoConfig": "own.Config"})
    refuse(copy, UnsupportedModel, "without running code of the checkpoint")


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refuse(copy, ModelNotFound, "no weights in .*model.safetensors.*give a directory")


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_truncated_weights(copy: Path, kept: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refuse(copy, ModelError, "weights file .* is damaged .*copy it again")


def test_garbage_instead_of_weights(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\x00garbage" * 1000)
    refuse(copy, ModelError, "weights file .* is damaged")


def test_weights_that_are_not_all_there_are_never_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refuse(copy, ModelError, r"lacks 1 weights \(model.layers.1.mlp.up_proj.weight\)")


def test_weights_of_other_shapes(copy: Path) -> None:
    edit_config(copy, intermediate_size=80)
    refuse(copy, ModelError, "other shapes than config.json says")


def test_a_missing_tokenizer(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    refuse(copy, ModelNotFound, r"no usable tokenizer in .*tokenizer\.json")


def test_a_damaged_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"model": ')
    refuse(copy, ModelNotFound, r"no usable tokenizer in .*tokenizer\.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float8"}, r"dtype: got 'float8'; allowed: auto, float32"),
        ({"device": "tpu"}, r"device: got 'tpu'; allowed: auto, cpu, cuda"),
        ({"device": "meta"}, r"device: got 'meta'"),
        ({"device": "cuda:99"}, r"device: 'cuda:99' is not there"),
    ],
)
def test_settings_that_cannot_be_had(
    checkpoint: Checkpoint, arguments: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_model(checkpoint("llama"), **arguments)


def test_weights_larger_than_memory_are_refused_before_they_are_read(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = loaded_bytes(copy, torch.float32)
    assert needed == 2 * loaded_bytes(copy, torch.bfloat16)
    monkeypatch.setattr(checkpoint_module, "available_bytes", lambda device: needed)
    refuse(copy, InsufficientMemory, r"take .* as float32 .* a tenth is kept free: .* are missing")
    load_model(copy, dtype="bfloat16", device="cpu", native="off")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}


def test_longrope_is_held_to_the_context_in_which_sequences_do_not_meet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_family(
        "phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=32
    )
    assert load_model(folder, device="cpu").max_model_len == 32
    assert "context held to 32 of 256 tokens: this model's LongRoPE" in caplog.text
    assert load_model(folder, device="cpu", max_model_len=20).max_model_len == 20
    with pytest.raises(
        ConfigurationError, match=r"max_model_len: got 33; allowed: at most 32: this"
    ):
        load_model(folder, max_model_len=33)


def test_a_configuration_without_a_context_length_needs_one() -> None:
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    assert loader_module._context_length(config, 64) == 64
    with pytest.raises(ConfigurationError, match="names no context length; set it"):
        loader_module._context_length(config, None)

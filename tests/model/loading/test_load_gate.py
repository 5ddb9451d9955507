"""The gate: families that would be wrong are turned away, and the trial finds silent errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.families import REFUSED, SUPPORTED, WINDOW, save_family
from transformers import LlamaForCausalLM

from penstock.gpu_worker.model.forward import attention
from penstock.gpu_worker.model.loading import load_gate as gate
from penstock.gpu_worker.model.loading.geometry import probe_geometry
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.shared.errors import UnsupportedModel

Checkpoint = Callable[[str], Path]

REASONS = {
    "llama4_text": "3 of its 4 layers are of type chunked_attention",
    "qwen3_next": "3 of its 4 layers are of type linear_attention",
    "qwen3_5_text": "3 of its 4 layers are of type linear_attention",
    "bloom": "its attention cannot be replaced",
    "falcon": "its attention cannot be replaced",
    "gptj": "its attention cannot be replaced",
    "gpt_neo": "its attention cannot be replaced",
    "mamba": "3 of its 3 layers are of type linear_attention",
    "lfm2": "2 of its 3 layers are of type conv",
    "falcon_h1": "3 of its 3 layers are of type hybrid",
    "bert": "layer 0 lets tokens see later ones, and so do 2 others",
    "whisper": "a trial step fails (asked for the logits of 2 tokens, the model gives "
    "those of 67: it does not heed logits_to_keep)",
    "t5": "it is an encoder-decoder",
}


def test_every_family_that_must_be_refused_has_its_reason() -> None:
    assert set(REASONS) - {"gptj"} == set(REFUSED) - {"gptj"}  # depends on transformers' version


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusal_names_architecture_reason_and_what_works(
    checkpoint: Checkpoint, model_type: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(checkpoint(model_type))
    message = str(caught.value)
    assert f"(model type {model_type}) is not supported: {REASONS[model_type]};" in message
    assert "penstock serves decoders in which every layer" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((model_type, "bfloat16") for model_type in SUPPORTED),  # float32: test_oracle.py
        *((model_type, "float16") for model_type in ("llama", "gemma2", "gpt_oss", "deepseek_v3")),
    ],
)
def test_supported_families_pass_in_half_precision(
    checkpoint: Checkpoint, model_type: str, dtype: str
) -> None:
    load_model(checkpoint(model_type), device="cpu", dtype=dtype).close()


def without(name: str) -> Callable[..., torch.Tensor]:
    """A paged attention that forgets one of its options."""
    real = attention.paged_attention

    def forgetful(*arguments: Any, **options: Any) -> torch.Tensor:
        return real(*arguments, **{**options, name: None})

    return forgetful


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "option"),
    [
        ("gemma2", "softcap"),
        ("gemma2", "window"),
        ("mistral", "window"),
        ("gpt_oss", "sinks"),
        ("gpt_oss", "window"),
    ],
)
def test_the_trial_notices_a_lost_option(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    option: str,
    dtype: str,
) -> None:
    monkeypatch.setattr(attention, "paged_attention", without(option))
    with pytest.raises(UnsupportedModel, match="its logits over the paged pool differ"):
        load_model(checkpoint(model_type), device="cpu", dtype=dtype)


def test_the_trial_alone_would_refuse_chunked_attention(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 hides its chunks in the mask: to attention they look like full layers."""
    monkeypatch.setattr(gate, "SUPPORTED_LAYERS", {"chunked_attention", "full_attention"})
    with pytest.raises(UnsupportedModel, match="its logits over the paged pool differ"):
        load_model(checkpoint("llama4_text"))


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "lfm2"])
def test_layers_that_never_reach_attention_are_counted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    kinds = {"linear_attention", "conv", "full_attention"}
    monkeypatch.setattr(gate, "SUPPORTED_LAYERS", kinds)
    with pytest.raises(UnsupportedModel, match=r"1 of its \d layers reach the attention function"):
        load_model(checkpoint(model_type))


def test_a_layer_beside_attention_is_found_by_the_trial(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1 runs a state-space layer beside each attention layer."""
    monkeypatch.setattr(gate, "SUPPORTED_LAYERS", {"hybrid"})
    with pytest.raises(UnsupportedModel, match="its logits over the paged pool differ"):
        load_model(checkpoint("falcon_h1"))


def test_a_model_that_gives_the_logits_of_other_tokens_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows as were asked for, but the first ones."""
    forward = LlamaForCausalLM.forward

    def first_rows(self: Any, *, logits_to_keep: Any = 0, **arguments: Any) -> Any:
        if isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = torch.arange(len(logits_to_keep))
        return forward(self, logits_to_keep=logits_to_keep, **arguments)

    monkeypatch.setattr(LlamaForCausalLM, "forward", first_rows)
    with pytest.raises(UnsupportedModel, match="logits of some tokens alone, it gives others"):
        load_model(checkpoint("llama"), device="cpu")


def test_a_window_larger_than_the_trial_is_said(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=gate.__name__):
        load_model(checkpoint("mistral"))
        assert "is not crossed" not in caplog.text
        assert "logits of 53 tokens agree" in caplog.text  # 29 + 24, past the window of 13
        load_model(save_family("mistral", tmp_path, sliding_window=250))
    assert WINDOW == 13
    assert "sliding window of 250 tokens is not crossed" in caplog.text


def test_a_layer_that_hides_its_window_is_refused(
    loaded_by_torch: Callable[[str], LoadedModel],
) -> None:
    model = loaded_by_torch("gemma2")
    probe = probe_geometry(model.model, model.device)
    model.model.config.layer_types[1] = "sliding_attention"
    try:
        with pytest.raises(UnsupportedModel, match="layer 1 is declared sliding_attention but"):
            gate.check_probe(model.model.config, probe)
    finally:
        model.model.config.layer_types[1] = "full_attention"
    gate.check_probe(model.model.config, probe)

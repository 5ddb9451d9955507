"""The model that `bench spec --widen` measures says what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.shared.errors import ConfigurationError
from penstock.tools.bench.speculation.speculation_options import SpeculationOptions
from penstock.tools.bench.speculation.widened import write_widened


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    folder = tmp_path / "small"
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_wider_model_is_larger_and_says_the_same(checkpoint: Path, tmp_path: Path) -> None:
    wider = tmp_path / "wider"
    wider.mkdir()
    write_widened(str(checkpoint), 5, wider)
    small, large = (AutoModelForCausalLM.from_pretrained(f) for f in (checkpoint, wider))
    assert large.config.intermediate_size == 5 * 24
    assert large.num_parameters() - small.num_parameters() == 2 * 3 * 16 * 4 * 24
    assert (wider / "tokenizer.json").read_text() == "{}"
    ids = torch.randint(64, (3, 20))
    torch.testing.assert_close(large(ids).logits, small(ids).logits)


def test_other_mlps_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi")
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "gpt2"
    )
    biased = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, mlp_bias=True,
    )  # fmt: skip
    LlamaForCausalLM(biased).save_pretrained(tmp_path / "biased")
    for name in ("phi", "gpt2", "biased"):
        with pytest.raises(ConfigurationError, match=r"--widen 2: the MLPs of .* are not gated"):
            write_widened(str(tmp_path / name), 2, tmp_path)


def test_a_shape_has_its_own_width_and_dtype() -> None:
    with pytest.raises(ConfigurationError, match="--widen 2: a model of --shape small"):
        SpeculationOptions(shape="small", widen=2)
    with pytest.raises(ConfigurationError, match="--dtype bfloat16: weights of --shape small"):
        SpeculationOptions(shape="small", dtype="bfloat16")

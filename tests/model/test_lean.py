"""The draft model's own forward pass: taken where it serves, left where it does not."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.gpu_worker.model.drafting.lean_llama import LeanLlama


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def same(lean):
    """A trial that a lean form passes."""
    return torch.ones(2, 64)


# q and o: 32x32, k and v: 32x16, three of 32x48; two layers and an output layer of 64x32.
NEEDED = 4 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 64 * 32)


@pytest.mark.parametrize(("spare", "taken"), [(NEEDED, True), (NEEDED - 1, False)])
def test_a_copy_of_the_weights_is_made_only_where_memory_is_spared(model, spare, taken, caplog):
    with caplog.at_level(logging.INFO):
        lean = LeanLlama.of(model, same, spare)
    assert (lean is not None) is taken
    assert ("more than the" in caplog.text) is not taken


def test_logits_that_differ_are_noticed(model, caplog):
    wrong = LeanLlama.of(model, lambda lean: torch.full((2, 64), 1.0 if lean else 1.1), NEEDED)
    assert wrong is None
    assert "logits differ" in caplog.text


def test_another_shape_is_left_to_transformers(model):
    model.config.attention_bias = True
    assert LeanLlama.of(model, same, NEEDED) is None


def test_a_model_whose_parts_have_other_names_is_left_to_transformers(model, caplog):
    del model.model.layers[1].self_attn.q_proj
    assert LeanLlama.of(model, same, NEEDED) is None
    assert "no attribute 'q_proj'" in caplog.text

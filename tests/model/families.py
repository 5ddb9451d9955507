"""Tiny random checkpoints of many model families, saved to disk as users' checkpoints are.

The weights are large on purpose: with the default initialisation (standard deviation 0.02)
attention is almost uniform, and a wrong mask, softcap or sink would hide below any tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

__all__ = [
    "REFUSED",
    "SUPPORTED",
    "VOCAB_SIZE",
    "WINDOW",
    "build_tokenizer",
    "others_slow",
    "save_family",
]

VOCAB_SIZE = 300
WINDOW = 13
CONTEXT = 256

# Names of the Llama line; families that differ say so below.
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = {"sliding_window": WINDOW}
_ALTERNATING = {
    **_SLIDING,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

_GPTJ = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "rotary_dim": 8}
_GPTJ_IS_SERVED = Version(transformers.__version__) >= Version("5.24")
"""Before, its attention could not be replaced."""

SUPPORTED: Mapping[str, Mapping[str, Any]] = {
    **({"gptj": _GPTJ} if _GPTJ_IS_SERVED else {}),
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": _SLIDING,
    "gemma": {"head_dim": 16},
    "gemma2": {
        **_ALTERNATING,
        "head_dim": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {**_ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "phi": {},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.3},
    "cohere2": _ALTERNATING,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "glm4": {"head_dim": 16},
    "stablelm": {},
    "starcoder2": _SLIDING,
    "gpt2": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 96,
        "n_positions": CONTEXT,
        "hidden_size": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "max_position_embeddings": None,
    },
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**_MOE, "head_dim": 16},
    "gpt_oss": {
        **_ALTERNATING,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
    },
}
"""Model type -> what its configuration says beyond the common names."""

_LINEAR_ATTENTION = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

REFUSED: Mapping[str, Mapping[str, Any]] = {
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": WINDOW,
    },
    "qwen3_next": {
        **_LINEAR_ATTENTION,
        **_MOE,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": _LINEAR_ATTENTION,
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {"num_kv_heads": 2, "num_key_value_heads": None},
    **({} if _GPTJ_IS_SERVED else {"gptj": _GPTJ}),
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "num_hidden_layers": None,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
    },
    "bert": {"num_key_value_heads": None},
    # The decoder of a speech model: its logits are those of all tokens, whatever is asked for.
    "whisper": {
        "d_model": 64,
        "decoder_layers": 3,
        "encoder_layers": 3,
        "decoder_attention_heads": 4,
        "encoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "max_target_positions": CONTEXT,
        "decoder_start_token_id": 1,
        "is_encoder_decoder": False,
    },
    "t5": {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16},
}
"""Families that would be silently or loudly wrong, and must be turned away with a reason."""


def others_slow(families: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test: all ``families``, those that are not in ``quick`` marked slow."""
    return [
        family if family in quick else pytest.param(family, marks=pytest.mark.slow)
        for family in families
    ]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 3 special tokens, the 256 bytes, and filler up to the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", *alphabet]
    words += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save_family(model_type: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random checkpoint of ``model_type`` with its tokenizer; returns its directory.

    Args:
        model_type: a key of :data:`SUPPORTED` or :data:`REFUSED`.
        folder: where the checkpoint's directory is made.
        seed: of the weights.
        changes: configuration values that replace the family's.
    """
    special = SUPPORTED.get(model_type) or REFUSED.get(model_type) or {}
    values = {**_BASE, **special, **changes}
    values = {key: value for key, value in values.items() if value is not None}
    config = AutoConfig.for_model(model_type, **values)
    path = folder / model_type
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if model_type == "t5":
            path.mkdir(parents=True)
            config.save_pretrained(path)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _enlarge(model)
            model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    generation = path / "generation_config.json"
    if generation.exists():
        # Random models end at once or never; what ends a sequence is tested elsewhere.
        settings = json.loads(generation.read_text())
        settings["eos_token_id"] = VOCAB_SIZE - 1
        generation.write_text(json.dumps(settings))
    return path


def _enlarge(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "embed" not in name and "wte" not in name:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        elif parameter.dim() >= 2:
            parameter.normal_(std=0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))

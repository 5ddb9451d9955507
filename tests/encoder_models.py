"""Tiny random encoders, saved to disk as those of sentence-transformers and transformers are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedTokenizerFast,
)

__all__ = ["FAMILIES", "MAX_TOKENS", "WIDTH", "encoder_tokenizer", "save_encoder", "save_modules"]

WIDTH = 32
MAX_TOKENS = 64
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")

_SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_OFFSET = {"max_position_embeddings": MAX_TOKENS + 1}  # positions count from behind padding_idx 0
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {**_OFFSET, "type_vocab_size": 1},
    "xlm-roberta": {**_OFFSET, "type_vocab_size": 1},
    "mpnet": {"max_position_embeddings": MAX_TOKENS + 2},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16},
    "distilbert": {"dim": WIDTH, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "t5": {"d_model": WIDTH, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
"""Model types, and where their configuration differs."""


def encoder_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that puts special tokens around text as the family's does."""
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if model_type == "mpnet":  # whose padding is number 1, whatever its configuration says
        words[:2] = "<s>", "<pad>"
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end = ("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])
    if model_type in ("qwen3", "t5"):
        template, pair = "$A </s>", "$A $B </s>"
    elif model_type in ("bert", "electra"):
        template, pair = "<s>:0 $A:0 </s>:0", "<s>:0 $A:0 </s>:0 $B:1 </s>:1"
    else:
        template, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=pair, special_tokens=[begin, end]
    )
    names = ["input_ids", "attention_mask"]
    if model_type in ("bert", "electra"):
        names.insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=MAX_TOKENS,
        model_input_names=names,
        padding_side="left" if model_type == "qwen3" else "right",
    )


def save_encoder(
    model_type: str, folder: Path, *, labels: int = 0, seed: int = 0, **changes: Any
) -> Path:
    """Save a model and its tokenizer.

    Args:
        model_type: one of :data:`FAMILIES`.
        folder: where to.
        labels: of a classification head; 0 saves a bare encoder.
        seed: of its weights.
        **changes: to its configuration.
    """
    tokenizer = encoder_tokenizer(model_type)
    values = {**_SHAPE, **FAMILIES[model_type], "vocab_size": len(tokenizer)}
    values["pad_token_id"] = tokenizer.pad_token_id
    if labels:
        values["num_labels"] = labels
    config = AutoConfig.for_model(model_type, **(values | changes))
    torch.manual_seed(seed)
    kind: Any = AutoModelForTextEncoding if model_type == "t5" else AutoModel
    model = (AutoModelForSequenceClassification if labels else kind).from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large, lest a wrong mask or position hides in nearly uniform attention.
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_modules(
    folder: Path, *modes: str, normalize: bool = False, prompts: dict[str, str] | None = None
) -> Path:
    """Write the files of sentence-transformers beside a model, as older checkpoints have them."""
    base = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] * normalize
    flags = {
        "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens",
    }  # fmt: skip
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"{base}.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": WIDTH,
            **{f"pooling_mode_{flag}": mode in modes for mode, flag in flags.items()},
        },
        "config_sentence_transformers.json": {"prompts": prompts or {}},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    if normalize:
        (folder / "2_Normalize").mkdir(exist_ok=True)
    return folder

"""Greedy tokens of a checkpoint: by the engine, and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model.engine_run import Bench
from transformers import AutoModelForCausalLM, GenerationConfig

from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model

__all__ = ["PROMPTS", "expected_greedy", "greedy", "tokens_of"]

PROMPTS = ((7,), (3, 4, 5, 6), tuple(range(10, 40)))
MAX_TOKENS = 12


def tokens_of(folder: Path) -> list[list[int]]:
    loaded = load_model(folder, device="cpu")
    try:
        return greedy(loaded)
    finally:
        loaded.close()


def greedy(model: LoadedModel) -> list[list[int]]:
    bench = Bench(model)
    for index, prompt in enumerate(PROMPTS):
        bench.add(str(index), prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    answers = bench.run()
    return [answers[str(index)].token_ids for index in range(len(PROMPTS))]


def expected_greedy(folder: Path) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config = GenerationConfig(
        max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.generation_config = GenerationConfig()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs

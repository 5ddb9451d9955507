"""What the model card states, measured on the files as shipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .evaluate import (
    Perplexity,
    agreement_on_generation,
    agreement_on_text,
    perplexity,
    sample,
)

PROMPT_TOKENS = 32
GENERATED_TOKENS = 64
GENERATED_ROWS = 64

SAMPLES = (
    # prompt, chat, temperature
    ("The assert statement", False, 0.0),
    ("Return a list of the words in the string, using", False, 0.0),
    ("Explain `str.split`.", True, 0.0),
    ("What does textwrap.wrap do?", True, 0.0),
    ("How do I use `json.dumps`?", True, 0.7),
    ("A generator is", False, 0.7),
    ("What is a context manager?", True, 0.7),
)


@dataclass(frozen=True)
class Sample:
    prompt: str
    chat: bool
    temperature: float
    text: str


@dataclass(frozen=True)
class Figures:
    """Everything measured after training, in fp32 on the bf16 weights as saved."""

    context: int
    parameters: dict[str, int]
    bytes: dict[str, int]
    layers: dict[str, int]
    perplexity: dict[str, Perplexity]
    agreement_text: float
    agreement_generation: float
    samples: tuple[Sample, ...]


def measure(directory: Path, windows: torch.Tensor, context: int) -> Figures:
    """Loads ``directory/{target,draft}`` and measures them on held-out ``windows``."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "target")
    models = {
        name: AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    }
    edges = tuple(context * part // 8 for part in (1, 2, 4, 8))
    rows = windows[:, 1 : 1 + PROMPT_TOKENS * (windows.shape[1] // PROMPT_TOKENS - 1)]
    prompts = rows.reshape(-1, PROMPT_TOKENS)
    prompts = prompts[:: max(1, len(prompts) // GENERATED_ROWS)][:GENERATED_ROWS]
    return Figures(
        context=context,
        parameters={name: model.num_parameters() for name, model in models.items()},
        bytes={
            name: sum(f.stat().st_size for f in (directory / name).iterdir()) for name in models
        },
        layers={name: model.config.num_hidden_layers for name, model in models.items()},
        perplexity={
            name: perplexity(model, windows, tokenizer, edges) for name, model in models.items()
        },
        agreement_text=agreement_on_text(models["target"], models["draft"], windows),
        agreement_generation=agreement_on_generation(
            models["target"], models["draft"], prompts, min(GENERATED_TOKENS, context // 2)
        ),
        samples=tuple(
            Sample(
                prompt, chat, temperature,
                sample(models["target"], tokenizer, prompt, chat=chat, temperature=temperature,
                       new_tokens=min(120, context // 2)),
            )
            for prompt, chat, temperature in SAMPLES
        ),
    )  # fmt: skip

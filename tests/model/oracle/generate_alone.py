"""A prompt's tokens as transformers' ``generate`` gives them, for the prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["generate_alone"]


def generate_alone(
    model: Any, prompt: Sequence[int], max_new_tokens: int, **options: Any
) -> tuple[int, ...]:
    """The greedy output, its end-of-text token included."""
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **options,
    )
    return tuple(ids[0, len(prompt) :].tolist())

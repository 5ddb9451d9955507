"""Text the target writes itself, for the draft to learn from.

A draft is judged on text that the target generates, not on the corpus. So it learns from the
target's own output. Agarwal et al., "On-Policy Distillation of Language Models", 2023, argue for
on-policy text; here the samples are the teacher's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger("train_demo_model")

PROMPT_LENGTHS = (4, 8, 16, 24, 32)
BATCH_ROWS = 64


def write_texts(
    target: Any, documents: Sequence[Sequence[int]], *, rows: int, new_tokens: int, seed: int
) -> list[list[int]]:
    """``rows`` continuations by ``target`` of prompts cut from ``documents``.

    Half the batches are greedy, half are sampled at temperature 0.7; half the prompts begin where
    a document does. Returns prompt and continuation of each row, up to and with its EOS.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    eos = target.config.eos_token_id
    target.set_attn_implementation("sdpa")
    texts: list[list[int]] = []
    for index in range(0, rows, BATCH_ROWS):
        batch = index // BATCH_ROWS
        length = PROMPT_LENGTHS[batch % len(PROMPT_LENGTHS)]
        count = min(BATCH_ROWS, rows - index)
        prompts = _prompts(documents, count, length, generator)
        options: dict[str, Any] = {"do_sample": False}
        if batch % 2:
            options = {"do_sample": True, "temperature": 0.7, "top_k": 0}
        with torch.inference_mode():
            output = target.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new_tokens,
                **options,
            )
        for row in output.tolist():
            end = row.index(eos, length) + 1 if eos in row[length:] else len(row)
            texts.append(row[:end])
        logger.info("draft: the target has written %d of %d texts", len(texts), rows)
    return texts


def _prompts(
    documents: Sequence[Sequence[int]], count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Int64 [count, length], every second row from the beginning of its document."""
    long_enough = [ids for ids in documents if len(ids) > length]
    rows = []
    for row in range(count):
        ids = long_enough[int(torch.randint(len(long_enough), (1,), generator=generator))]
        latest = len(ids) - length
        start = 0 if row % 2 else int(torch.randint(latest, (1,), generator=generator))
        rows.append(ids[start : start + length])
    return torch.tensor(rows)

"""How exact a model is in a number format: beside its dequantised weights, and beside full ones."""

from __future__ import annotations

import random

import torch

from penstock.gpu_worker.model.loading.checkpoint import find_checkpoint
from penstock.gpu_worker.model.loading.loader import load_model
from penstock.gpu_worker.model.quantization.recipe import Recipe

from ...report import Number
from ...rounds import Progress
from ...verify.full_model import compare_with_full
from ...verify.hf_reference import load_by_transformers
from ...verify.inputs import gather_inputs, text_windows
from ...verify.teacher_forcing import Passage, compare_logits
from .number_format import NumberFormat

__all__ = ["format_exactness"]

_CONTEXT = 512
_CHUNK = 96


def format_exactness(
    model: str, number_format: NumberFormat, progress: Progress
) -> dict[str, Number]:
    """Lead the model in one format along an excerpt of Python's reference, in float32.

    Args:
        model: the checkpoint, in full.
        number_format: which is compared with it.
        progress: told the windows of text that are done.

    Returns:
        ``tokens_equal_percent`` is the share of positions at which penstock and transformers over
        the dequantised weights give the same token the largest logit. ``perplexity_ratio`` compares
        these weights with full ones, and ``tokens_as_full_percent`` counts positions with the same
        token as theirs.

    Raises:
        ModelError: the model cannot be loaded.
    """
    path, recipe = find_checkpoint(number_format.model), Recipe(number_format.quantization)
    loaded = load_model(path, dtype="float32", device="cpu", recipe=recipe)
    try:
        inputs = gather_inputs(
            loaded, prompts_file=None, prompts_count=1, text_file=None, max_tokens=1, seed=0
        )
        windows = [
            Passage(inputs.text_ids[begin:end], scored - begin)
            for begin, end, scored in text_windows(
                len(inputs.text_ids), min(_CONTEXT, loaded.max_model_len)
            )
        ]
        reference = load_by_transformers(path, torch.float32, loaded.device, recipe)
        progress(f"exactness of {number_format.name}", 0, 0)
        found = compare_logits(
            loaded, reference, None, windows, random.Random(0), longest_chunk=_CHUNK,
            progress=lambda _: None,
        )  # fmt: skip
        against = compare_with_full(find_checkpoint(model), loaded, reference, windows, progress)
    finally:
        loaded.close()
    return {
        "tokens_equal_percent": 100 * found.agreed / found.scored,
        "perplexity_ratio": against["perplexity_ratio_to_full"],
        "tokens_as_full_percent": 100 * against["token_agreement_with_full"],
    }

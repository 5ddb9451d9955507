"""How far a quantised model is from the full one: perplexity and agreement along a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.gpu_worker.model.loading.checkpoint import find_checkpoint
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.shared.errors import ConfigurationError

from ..report import Number
from .hf_reference import Reference, load_by_transformers
from .teacher_forcing import Passage

__all__ = ["compare_with_full"]


def compare_with_full(
    path: Path,
    loaded: LoadedModel,
    reference: Reference,
    windows: Sequence[Passage],
    progress: Callable[[str, int, int], None],
) -> dict[str, Number]:
    """Figures of the checkpoint at ``path`` beside those of ``reference``.

    Args:
        path: of the full checkpoint, with the same tokenizer.
        loaded: the quantised model.
        reference: the same by transformers.
        windows: of the text; scored tokens count.
        progress: told the windows done.

    Returns:
        ``perplexity_full``, ``perplexity_ratio_to_full``, and ``token_agreement_with_full``: the
        share of scored positions before which both give the same token the largest logit.

    Raises:
        ConfigurationError: the two have different vocabularies.
        ModelError: the full checkpoint cannot be read.
    """
    full = load_by_transformers(find_checkpoint(path), loaded.dtype, loaded.device)
    sums, scored, same = [0.0, 0.0], 0, 0
    for index, window in enumerate(windows):
        progress("full model", index, len(windows))
        if window.score_from is None:
            continue
        rows = [model.logits(window.token_ids) for model in (full, reference)]
        if rows[0].shape != rows[1].shape:
            raise ConfigurationError(
                f"--full: {path} has {rows[0].shape[1]} tokens and the model {rows[1].shape[1]}; "
                "give the checkpoint that was quantised"
            )
        first = max(window.score_from, 1)
        targets = rows[0].new_tensor(window.token_ids[first:]).long().unsqueeze(1)
        before = [logits[first - 1 : -1] for logits in rows]
        for which, logits in enumerate(before):
            sums[which] -= float(logits.log_softmax(-1).gather(1, targets).sum())
        same += int((before[0].argmax(-1) == before[1].argmax(-1)).sum())
        scored += len(targets)
    return {
        "perplexity_full": math.exp(min(sums[0] / scored, 700)),
        "perplexity_ratio_to_full": math.exp(min((sums[1] - sums[0]) / scored, 700)),
        "token_agreement_with_full": same / scored,
    }

"""The verification itself: greedy tokens, logits and perplexity against transformers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.shared.errors import ConfigurationError

from ..model.loader import LoadedModel, load_model
from .forced import Comparison, Passage, compare_logits
from .greedy import Greedy, compare_greedy
from .inputs import Inputs, gather_inputs, text_windows
from .reference import Reference
from .report import Check, Number, Report

__all__ = ["Progress", "VerifyOptions", "verify_model"]

Progress = Callable[[str, int, int], None]
"""Told the stage, how much of it is done and how much there is."""

LIMITS: dict[torch.dtype, dict[str, Number]] = {
    torch.float32: {
        "tokens_mismatched": 0,
        "max_rel_logit_diff": 1e-4,
        "perplexity_rel_diff": 1e-4,
    },
    torch.float16: {"median_rel_logit_diff": 1e-2, "perplexity_rel_diff": 1e-2},
    torch.bfloat16: {"median_rel_logit_diff": 5e-2, "perplexity_rel_diff": 5e-2},
}
"""What is checked, by dtype. Over 26 tiny random families the largest values were: in float32
3e-5 and 1e-7, in float16 (median) 2e-3 and 7e-4, in bfloat16 (median) 2e-2 and 4e-3."""

_SHOWN = 6
"""Differences between tokens that get a note each."""

_LOWEST = (("prompts_count", 1), ("max_tokens", 1), ("context", 2), ("seed", 0), ("threads", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to verify and on what.

    Attributes:
        model: a checkpoint's directory, or ``demo``.
        prompts_file: see :func:`.inputs.gather_inputs`.
        prompts_count: prompts to draw where no file is given; at least 1.
        text_file: see :func:`.inputs.gather_inputs`.
        max_tokens: output tokens of each prompt; at least 1.
        context: tokens of one window of the text; at least 2. A text that is longer is read in
            windows that overlap by half.
        seed: of prompts, chunkings and mixes.
        dtype: as in :func:`penstock.gpu_worker.model.load_model`.
        device: as there.
        threads: CPU threads; None leaves them as they are.
    """

    model: str
    prompts_file: Path | None = None
    prompts_count: int | None = None
    text_file: Path | None = None
    max_tokens: int = 24
    context: int = 512
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, low in _LOWEST:
            value = getattr(self, name)
            if value is not None and value < low:
                option = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{option}: got {value}; allowed: {low} or more")
        if self.prompts_file is not None and self.prompts_count is not None:
            raise ConfigurationError(
                "--prompts-count: the prompts come from --prompts; leave one of the two out"
            )


def verify_model(options: VerifyOptions, progress: Progress = lambda *_: None) -> Report:
    """Whether a checkpoint gives here what it gives in transformers.

    Loads it twice, so it takes the memory of two: for penstock, and with
    ``AutoModelForCausalLM`` and eager attention as the reference. Then compares

    1. greedy tokens: all prompts through the engine in random chunks and mixes, once with plenty
       of KV blocks and once with so few that sequences are preempted, against ``generate`` one
       prompt at a time,
    2. logits along the reference's sequences and the text: per token
       ``max|ours - theirs| / max|theirs|``; tokens alone would miss a lost softcap,
    3. the text's perplexity, ``exp`` of the mean negative log-likelihood.

    In float32 all three are checked. In half precision rounding decides between tokens that are
    nearly alike, and in mixtures of experts even which experts a token sees, so there the *median*
    over tokens of the logit difference and the perplexity are checked, with wider limits, and
    tokens are reported.

    Raises:
        ConfigurationError: an option is wrong, a file cannot be read, a prompt does not fit.
        ModelError: the model cannot be loaded, or the load gate refuses it.
    """
    begin, threads = time.perf_counter(), torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    progress("loading for penstock", 0, 0)
    try:
        loaded = load_model(options.model, dtype=options.dtype, device=options.device)
        try:
            return _verify(loaded, options, progress, begin)
        finally:
            loaded.close()
    finally:
        torch.set_num_threads(threads)


def _verify(
    loaded: LoadedModel, options: VerifyOptions, progress: Progress, begin: float
) -> Report:
    inputs = gather_inputs(
        loaded,
        prompts_file=options.prompts_file,
        prompts_count=8 if options.prompts_count is None else options.prompts_count,
        text_file=options.text_file,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    progress("loading for transformers", 0, 0)
    reference = Reference(loaded)
    rng = random.Random(options.seed + 1)
    greedy = compare_greedy(loaded, reference, inputs.prompts, options.max_tokens, rng, progress)
    sequences = [Passage(ids) for ids in greedy.sequences]
    logits = _forced(loaded, reference, sequences, rng, "logits", progress, longest_chunk=24)
    windows = _windows(inputs, min(options.context, loaded.max_model_len))
    text = _forced(loaded, reference, windows, rng, "perplexity", progress, longest_chunk=96)
    longest = max(len(passage.token_ids) for passage in (*sequences, *windows))
    return _report(loaded, inputs, greedy, logits, text, longest, time.perf_counter() - begin)


def _windows(inputs: Inputs, length: int) -> list[Passage]:
    return [
        Passage(inputs.text_ids[begin:end], scored - begin)
        for begin, end, scored in text_windows(len(inputs.text_ids), length)
    ]


def _forced(
    loaded: LoadedModel,
    reference: Reference,
    passages: list[Passage],
    rng: random.Random,
    stage: str,
    progress: Progress,
    *,
    longest_chunk: int,
) -> Comparison:
    total, done = sum(len(passage.token_ids) for passage in passages), 0

    def step(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress(stage, done, total)

    return compare_logits(
        loaded, reference, passages, rng, longest_chunk=longest_chunk, progress=step
    )


def _report(
    loaded: LoadedModel,
    inputs: Inputs,
    greedy: Greedy,
    logits: Comparison,
    text: Comparison,
    longest: int,
    seconds: float,
) -> Report:
    every = Comparison([*logits.differences, *text.differences])
    mean, mean_reference = text.nll / text.scored, text.nll_reference / text.scored
    figures: dict[str, Number] = {
        "prompts": len(inputs.prompts),
        **greedy.figures(),
        "logit_rows_compared": len(every.differences),
        "max_rel_logit_diff": every.largest,
        "median_rel_logit_diff": every.median,
        "perplexity": _exp(mean),
        "perplexity_transformers": _exp(mean_reference),
        "perplexity_rel_diff": _relative(mean - mean_reference),
        "perplexity_tokens": text.scored,
        "longest_sequence": longest,
        "seconds": round(seconds, 3),
    }
    notes = [*inputs.notes, *greedy.notes[:_SHOWN]]
    if len(greedy.notes) > _SHOWN:
        notes.append(f"and {len(greedy.notes) - _SHOWN} further differences between tokens")
    if loaded.dtype != torch.float32:
        dtype = str(loaded.dtype).removeprefix("torch.")
        notes.append(f"in {dtype} equal tokens are reported but not required")
    notes += [
        f"a sliding window of {window} tokens was not crossed: the longest sequence had {longest}; "
        "give a longer --text and a larger --context"
        for window in loaded.geometry.windows
        if window >= longest
    ]
    limits = LIMITS.get(loaded.dtype, LIMITS[torch.bfloat16])
    checks = tuple(Check(name, figures[name], limit) for name, limit in limits.items())
    return Report(str(loaded.path), figures, checks, tuple(notes))


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _relative(difference: float) -> float:
    """Relative difference of two perplexities from that of their logarithms.

    Exact also where the perplexities themselves overflow.
    """
    return abs(math.expm1(difference)) if abs(difference) < 700 else math.inf

"""The verification itself: greedy tokens, logits and perplexity against transformers."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable

import torch

from penstock.gpu_worker.model.loading.loader import (
    LoadedModel,
    check_kv_cache_dtype,
    load_model,
    pick_device,
)
from penstock.gpu_worker.model.quantization.recipe import Recipe

from ..report import Check, Number, Progress, Report
from .full_model import compare_with_full
from .greedy import Greedy, compare_greedy
from .hf_reference import Reference, load_reference
from .inputs import Inputs, gather_inputs, text_windows
from .options import VerifyOptions
from .teacher_forcing import Comparison, Passage, compare_logits

__all__ = ["verify_model"]

EXACT_LIMITS: dict[str, Number] = {
    "tokens_mismatched": 0,
    "modes_missing": 0,
    "max_rel_logit_diff": 1e-4,
    "perplexity_rel_diff": 1e-4,
}
"""In float32. The largest values seen over 26 tiny random families were 3e-5 and 1e-7."""

HALF_LIMITS: dict[str, Number] = {
    "modes_missing": 0,
    "logit_error_ratio": 1.5,
    "perplexity_rel_diff": 5e-2,
}
"""In float16 and bfloat16. The largest values seen over the same families were 1.05 and 5e-3. A
lost softcap, sink or scale, or a window off by one, gives ratios from 10 on."""

_SHOWN = 6
"""Differences between tokens that get a note each."""

_NO_ERROR = 1e-9
"""Below any rounding: keeps a ratio of errors defined."""

_SMALL = 30_000_000
"""With so few weights per token, a model's operations end before a second thread wakes. On a shared
machine, threads that waited for each other made it 20 times slower."""


def verify_model(options: VerifyOptions, progress: Progress = lambda *_: None) -> Report:
    """Whether a checkpoint gives here what it gives in transformers.

    Loads it for penstock, and with ``AutoModelForCausalLM`` and eager attention as the reference.
    That takes twice the memory, in half precision four times. Then compares

    1. greedy tokens of all prompts, in random chunks and mixes, with ``generate`` one prompt at a
       time. Three rounds have plenty of KV blocks, so few that sequences are preempted and computed
       again, and so few that they are swapped. In two of them layers with a window have pools of
       their own. A round that did not do what it is for is no success,
    2. logits along the reference's sequences and the text: per token
       ``max|ours - theirs| / max|theirs|``; tokens alone would miss a lost softcap,
    3. the text's perplexity, ``exp`` of the mean negative log-likelihood.

    In float32 all three are checked. In half precision rounding decides between tokens that are
    nearly alike, and in a deep model two right computations may differ by a tenth. So there tokens
    are only reported, and logits are measured against a third computation, of the same weights in
    float32. Ours may lie at most 1.5 times as far from it as transformers' own (medians over
    tokens).

    A model that ``options.quantization`` rounds is compared with transformers over the rounded
    weights. What rounding costs is reported against the full model, and not checked.

    Raises:
        ConfigurationError: an option is wrong, a file cannot be read, a prompt does not fit.
        ModelError: the model cannot be loaded, or the load gate refuses it.
    """
    begin, threads = time.perf_counter(), torch.get_num_threads()
    check_kv_cache_dtype(options.kv_cache_dtype or "auto", pick_device(options.device))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    progress("loading for penstock", 0, 0)
    try:
        recipe = Recipe(options.quantization)
        loaded = load_model(
            options.model, dtype=options.dtype, device=options.device, recipe=recipe
        )
        if options.threads is None and loaded.multiplied_weights < _SMALL:
            torch.set_num_threads(1)
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
    reference = load_reference(loaded)
    rng = random.Random(options.seed + 1)
    greedy = compare_greedy(loaded, reference, inputs.prompts, options.max_tokens, rng, progress)
    half = loaded.dtype != torch.float32
    exact = reference.exact() if half else None
    sequences = [Passage(ids) for ids in greedy.sequences]
    windows = _windows(inputs, min(options.context, loaded.max_model_len))
    found = Comparison()
    for stage, passages, longest_chunk in (("logits", sequences, 24), ("perplexity", windows, 96)):
        step = _steps(stage, passages, progress)
        found.add(
            compare_logits(
                loaded, reference, exact, passages, rng, longest_chunk=longest_chunk, progress=step
            )
        )
    longest = max(len(passage.token_ids) for passage in (*sequences, *windows))
    against: dict[str, Number] = {}
    full = loaded.path if loaded.recipe.quantizes else options.full
    if full is not None:
        against = compare_with_full(full, loaded, reference, windows, progress)
    if options.kv_cache_dtype is not None:
        against |= _with_small_kv(loaded, reference, windows, rng, options, progress)
    seconds = time.perf_counter() - begin
    return _report(loaded, inputs, greedy, found, longest, seconds, against)


def _with_small_kv(
    loaded: LoadedModel,
    reference: Reference,
    windows: list[Passage],
    rng: random.Random,
    options: VerifyOptions,
    progress: Progress,
) -> dict[str, Number]:
    """What the KV cache in 8 bits changes along the text, against transformers' full one."""
    kind = options.kv_cache_dtype or "auto"
    small = load_model(
        loaded.path,
        dtype=options.dtype,
        device=options.device,
        recipe=loaded.recipe,
        kv_cache_dtype=kind,
    )
    try:
        step = _steps("KV in 8 bits", windows, progress)
        found = compare_logits(
            small, reference, None, windows, rng, longest_chunk=96, progress=step
        )
    finally:
        small.close()
    return {
        f"kv_{kind}_perplexity_ratio": _exp((found.nll - found.nll_reference) / found.scored),
        f"kv_{kind}_token_agreement": found.agreed / found.scored,
        f"kv_{kind}_median_rel_logit_diff": statistics.median(found.differences),
    }


def _windows(inputs: Inputs, length: int) -> list[Passage]:
    return [
        Passage(inputs.text_ids[begin:end], scored - begin)
        for begin, end, scored in text_windows(len(inputs.text_ids), length)
    ]


def _steps(stage: str, passages: list[Passage], progress: Progress) -> Callable[[int], None]:
    total, done = sum(len(passage.token_ids) for passage in passages), 0

    def step(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress(stage, done, total)

    return step


def _report(
    loaded: LoadedModel,
    inputs: Inputs,
    greedy: Greedy,
    found: Comparison,
    longest: int,
    seconds: float,
    against: dict[str, Number],
) -> Report:
    mean, mean_reference = found.nll / found.scored, found.nll_reference / found.scored
    figures: dict[str, Number] = {
        "prompts": len(inputs.prompts),
        **greedy.figures(),
        "logit_rows_compared": len(found.differences),
        "max_rel_logit_diff": max(found.differences),
        "median_rel_logit_diff": statistics.median(found.differences),
        "perplexity": _exp(mean),
        "perplexity_transformers": _exp(mean_reference),
        "perplexity_rel_diff": _relative(mean - mean_reference),
        "perplexity_tokens": found.scored,
        **against,
        "longest_sequence": longest,
        "seconds": round(seconds, 3),
    }
    notes = [*inputs.notes, *greedy.notes[:_SHOWN]]
    if len(greedy.notes) > _SHOWN:
        notes.append(f"and {len(greedy.notes) - _SHOWN} further differences between tokens")
    limits = EXACT_LIMITS
    if loaded.dtype != torch.float32:
        limits = HALF_LIMITS
        dtype = str(loaded.dtype).removeprefix("torch.")
        notes.append(f"in {dtype} equal tokens are reported but not required")
    if found.errors:
        error = statistics.median(found.errors)
        error_reference = statistics.median(found.errors_reference)
        figures["logit_error"] = error
        figures["logit_error_transformers"] = error_reference
        figures["logit_error_ratio"] = error / max(error_reference, _NO_ERROR)
    notes += [
        f"a sliding window of {window} tokens was not crossed: the longest sequence had {longest}; "
        "give a longer --text and a larger --context"
        for window in loaded.geometry.windows
        if window >= longest
    ]
    checks = tuple(Check(name, figures[name], limit) for name, limit in limits.items())
    return Report(str(loaded.path), figures, checks, tuple(notes))


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _relative(difference: float) -> float:
    """Relative difference of two perplexities from that of their logarithms.

    Exact also where the perplexities themselves overflow.
    """
    return abs(math.expm1(difference)) if abs(difference) < 700 else math.inf

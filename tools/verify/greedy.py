"""Greedy tokens by both paths."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.gpu_worker.model.loading.loader import LoadedModel

from ..report import Number
from .batch_mixes import Memory, Mix, generate_mixed
from .hf_reference import Reference

__all__ = ["Greedy", "compare_greedy"]

TIE = 1e-5
"""Two logits that differ by less than this share of the row's largest are alike in float32. Two
right ways to compute them differ by some 1e-6, so either token is as good."""

_TRIES = 3
"""A round that did not do what it was for is drawn anew, and made to do it; all are compared."""


@dataclass(slots=True)
class Greedy:
    """How the tokens compare, over all mixes.

    Attributes:
        sequences: prompt and reference output of each prompt.
        compared: tokens looked at. Past the first difference a prompt's tokens hang on different
            pasts. So tokens after a tie are not compared; those after a mismatch count as compared
            and not equal.
        equal: of these, tokens that agree.
        tied: first differences between tokens that are alike in the reference's logits.
        mismatched: first differences that are not, and outputs that ended early.
        mixes: how each round ran.
        modes_missing: what rounds were for and did not do in any try.
        notes: one sentence for each difference.
    """

    sequences: list[tuple[int, ...]]
    compared: int = 0
    equal: int = 0
    tied: int = 0
    mismatched: int = 0
    mixes: list[Mix] = field(default_factory=list)
    modes_missing: int = 0
    notes: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Number]:
        """The figures for the report."""
        return {
            "tokens_compared": self.compared,
            "tokens_equal": self.equal,
            "tokens_tied": self.tied,
            "tokens_mismatched": self.mismatched,
            "rounds": len(self.mixes),
            "steps": sum(mix.steps for mix in self.mixes),
            "mixed_steps": sum(mix.mixed_steps for mix in self.mixes),
            "widest_step": max(mix.widest for mix in self.mixes),
            "preemptions": sum(mix.preemptions for mix in self.mixes),
            "swapped_blocks": sum(mix.swapped for mix in self.mixes),
            "kv_pools": max(mix.pools for mix in self.mixes),
            "steps_past_windows": sum(mix.left_windows for mix in self.mixes),
            "prefix_hit_tokens": sum(mix.prefix_hits for mix in self.mixes),
            "modes_missing": self.modes_missing,
        }


def compare_greedy(
    loaded: LoadedModel,
    reference: Reference,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    rng: random.Random,
    progress: Callable[[str, int, int], None],
) -> Greedy:
    """Continue ``prompts`` by both paths and compare token by token.

    Three rounds: with plenty of KV blocks, and with so few that sequences are preempted, and then
    computed again or swapped. In one of them, which is drawn, all layers share a pool; in the
    others layers with a window have their own.
    """
    expected: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        progress("tokens of transformers", index, len(prompts))
        expected.append(reference.generate(prompt, max_tokens))
    result = Greedy([(*prompt, *ids) for prompt, ids in zip(prompts, expected, strict=True)])
    each = len(prompts) * max_tokens
    done, total = 0, len(Memory) * each

    def step(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress("tokens of penstock", done, total)

    shared = rng.choice(list(Memory))
    for memory in Memory:
        for tries in range(1, _TRIES + 1):
            mix = generate_mixed(
                loaded,
                prompts,
                max_tokens,
                rng,
                memory=memory,
                by_window=memory is not shared,
                forced=tries > 1,
                progress=step,
            )
            result.mixes.append(mix)
            result.notes += mix.problems
            for index, (ours, theirs) in enumerate(zip(mix.output_ids, expected, strict=True)):
                _compare(result, reference, index, len(prompts[index]), ours, theirs)
            if not mix.missing:
                break
            total += each if tries < _TRIES else 0
        result.modes_missing += len(mix.missing)
        result.notes += [f"round '{memory}': {what}; give more prompts" for what in mix.missing]
    return result


def _compare(
    result: Greedy,
    reference: Reference,
    index: int,
    prompt_length: int,
    ours: Sequence[int],
    theirs: Sequence[int],
) -> None:
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    result.equal += same
    if same == len(ours) == len(theirs):
        result.compared += same
        return
    where = f"prompt {index + 1}, output token {same}"
    if same == min(len(ours), len(theirs)):
        gap = math.inf
        result.notes.append(f"{where}: {len(ours)} tokens here, {len(theirs)} in transformers")
    else:
        past = result.sequences[index][: prompt_length + same]
        gap = _gap(reference.logits(past)[-1], ours[same], theirs[same])
        result.notes.append(
            f"{where}: {ours[same]} here, {theirs[same]} in transformers, whose logits lie "
            f"{gap:.1e} of the largest apart{': a tie' if gap <= TIE else ''}"
        )
    if gap <= TIE:
        result.tied += 1
        result.compared += same + 1
    else:
        result.mismatched += 1
        result.compared += max(len(ours), len(theirs))


def _gap(row: Tensor, ours: int, theirs: int) -> float:
    """How far apart the reference's logits of the two tokens are, relative to its largest."""
    return float((row[theirs] - row[ours]).abs() / row.abs().max())

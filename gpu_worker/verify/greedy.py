"""Greedy tokens by both paths."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.shared.report import Number

from ..model.loader import LoadedModel
from .mixes import Mix, generate_mixed
from .reference import Reference

__all__ = ["Greedy", "compare_greedy"]

TIE = 1e-5
"""Two logits that differ by less than this share of the row's largest are alike in float32: two
right ways to compute them differ by some 1e-6, and either token is then as good."""

_MIXES = (False, True)  # whether KV blocks are scarce


@dataclass(slots=True)
class Greedy:
    """How the tokens compare, over all mixes.

    Attributes:
        sequences: prompt and reference output of each prompt.
        compared: tokens looked at. Past the first difference a prompt's tokens hang on different
            pasts, so those after a tie are not compared, while those after a mismatch count as
            compared and not equal.
        equal: of these, tokens that agree.
        tied: first differences between tokens that are alike in the reference's logits.
        mismatched: first differences that are not, and outputs that ended early.
        mixes: how each round ran.
        notes: one sentence for each difference.
    """

    sequences: list[tuple[int, ...]]
    compared: int = 0
    equal: int = 0
    tied: int = 0
    mismatched: int = 0
    mixes: list[Mix] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Number]:
        """The figures for the report."""
        return {
            "tokens_compared": self.compared,
            "tokens_equal": self.equal,
            "tokens_tied": self.tied,
            "tokens_mismatched": self.mismatched,
            "steps": sum(mix.steps for mix in self.mixes),
            "mixed_steps": sum(mix.mixed_steps for mix in self.mixes),
            "widest_step": max(mix.widest for mix in self.mixes),
            "preemptions": sum(mix.preemptions for mix in self.mixes),
            "prefix_hit_tokens": sum(mix.prefix_hits for mix in self.mixes),
        }


def compare_greedy(
    loaded: LoadedModel,
    reference: Reference,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    rng: random.Random,
    progress: Callable[[str, int, int], None],
) -> Greedy:
    """Continue ``prompts`` by both paths and compare token by token."""
    expected: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        progress("tokens of transformers", index, len(prompts))
        expected.append(reference.generate(prompt, max_tokens))
    result = Greedy([(*prompt, *ids) for prompt, ids in zip(prompts, expected, strict=True)])
    done, total = 0, len(_MIXES) * len(prompts) * max_tokens

    def step(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress("tokens of penstock", done, total)

    for scarce in _MIXES:
        mix = generate_mixed(loaded, prompts, max_tokens, rng, scarce=scarce, progress=step)
        result.mixes.append(mix)
        result.notes += mix.problems
        for index, (ours, theirs) in enumerate(zip(mix.output_ids, expected, strict=True)):
            _compare(result, reference, index, len(prompts[index]), ours, theirs)
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

"""How many drafts pay: the lengths that promise the most tokens per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .speculation_cost import StepCosts

__all__ = ["Pool", "best_lengths", "cut", "expected_gain", "worth_verifying"]

_MARGIN = 1.02
"""Another length must promise this much more than the present one, or it would flap with noise."""

_SOME = 1.03
"""Drafting at all must promise this much more than not drafting."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Sequences of a step that could have drafts of one kind.

    Attributes:
        count: how many.
        rate: their mean acceptance rate.
        present: drafts that such sequences had in the steps before.
    """

    count: int
    rate: float
    present: int


def expected_gain(rate: float, length: int) -> float:
    """Tokens that ``length`` drafts add on average: ``rate + rate**2 + ... + rate**length``."""
    if rate >= 1.0:
        return float(length)
    return rate * (1.0 - rate**length) / (1.0 - rate)


def best_lengths(
    costs: StepCosts, num_sequences: int, num_prompt: int, text: Pool, draft: Pool, longest: int
) -> tuple[int, int, float]:
    """Drafts for each sequence with a text match and for each with the draft model.

    Their joint optimum is flat, so one is chosen after the other.

    Args:
        costs: what steps cost.
        num_sequences: of the step, all of them.
        num_prompt: query tokens of prompts in it, which make drafts relatively cheaper.
        text: sequences with a match.
        draft: sequences that can only have the draft model's.
        longest: most drafts.

    Returns:
        Both lengths, and the tokens per second they promise.
    """
    prompt_seconds = num_prompt * costs.token(num_sequences)

    def rate(text_length: int, draft_length: int) -> float:
        num_drafts = text.count * text_length + draft.count * draft_length
        seconds = prompt_seconds + costs.verify(num_sequences, num_drafts / num_sequences)
        seconds += costs.draft(draft.count, draft_length)
        gain = text.count * expected_gain(text.rate, text_length)
        gain += draft.count * expected_gain(draft.rate, draft_length)
        return (num_sequences + gain) / seconds

    text_length, draft_length = 0, 0
    if text.count:
        rates = [rate(length, 0) for length in range(longest + 1)]
        text_length = _choose(rates, text.present)
    if draft.count:
        rates = [rate(text_length, length) for length in range(longest + 1)]
        draft_length = _choose(rates, draft.present)
    return text_length, draft_length, rate(text_length, draft_length)


def _choose(rates: list[float], present: int) -> int:
    """The best length, if it is clearly better than staying and than none."""
    best = max(range(len(rates)), key=rates.__getitem__)
    if rates[best] < rates[present] * _MARGIN:
        best = present
    # To begin takes more than to go on, so that it does not flicker at the edge.
    enough = rates[0] * (1.0 if present else _SOME)
    return best if rates[best] > enough else 0


def worth_verifying(
    costs: StepCosts, num_sequences: int, num_drafts: int, promised: float
) -> float:
    """The least probability at which one more draft is worth its place in the step.

    Args:
        costs: what steps cost.
        num_sequences: of the step.
        num_drafts: of the step.
        promised: tokens per second of the step.
    """
    each = num_drafts / num_sequences
    marginal = costs.verify(num_sequences, each + 1) - costs.verify(num_sequences, each)
    return promised * marginal / num_sequences


def cut(rate: float, length: int, worth: float) -> int:
    """As many of ``length`` drafts as are accepted with probability ``worth`` or more."""
    if worth <= 0 or rate >= 1 or rate**length >= worth:
        return length
    if worth >= 1 or rate <= 0:
        return 0
    return int(math.log(worth) / math.log(rate))

"""How many drafts pay: the lengths that promise the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .verification_cost import StepCosts

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
    costs: StepCosts,
    num_sequences: int,
    num_prompt: int,
    text: Pool,
    draft: Pool,
    longest: int,
    *,
    some: bool = False,
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
        some: not none, even if that promises more.

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
        text_length = _choose(lambda k: rate(k, 0), text.present, longest, some)
    if draft.count:
        needed = some and not text.count
        draft_length = _choose(lambda k: rate(text_length, k), draft.present, longest, needed)
        if draft_length and text.count and not text_length:
            # That there are any drafts is paid for now.
            text_length = _choose(lambda k: rate(k, draft_length), text.present, longest, False)
    return text_length, draft_length, rate(text_length, draft_length)


def _choose(rate: Callable[[int], float], present: int, longest: int, some: bool) -> int:
    """The best length, if it is clearly better than staying and than none.

    Beyond the first draft rates rise and then fall: nobody looks further than that.
    """
    none, best, highest = rate(0), 0, 0.0
    for length in range(1, longest + 1):
        promised = rate(length)
        if promised <= highest:
            break
        best, highest = length, promised
    if some:
        return best
    if 0 < present <= longest and highest < rate(present) * _MARGIN:
        best, highest = present, rate(present)
    # To begin takes more than to go on, so that it does not flicker at the edge.
    return best if highest > none * (1.0 if present else _SOME) else 0


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

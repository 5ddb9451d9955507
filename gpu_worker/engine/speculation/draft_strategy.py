"""What one sequence may get in a step, and from where all of them do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from .draft_length import expected_gain
from .draft_state import Source

__all__ = ["Choice", "LineUp", "limit", "line_up"]

_TYPICAL_LENGTH = 4
"""By which sources are compared, before it is known how many drafts there will be."""


@dataclass(slots=True)
class Choice:
    """Drafts for one span.

    Attributes:
        index: of the span.
        source: where they come from.
        rate: how likely each is accepted once those before it were.
        count: how many.
        drafts: the tokens, at least ``count``; empty where the draft model is to propose them.
    """

    index: int
    source: Source
    rate: float
    count: int
    drafts: tuple[int, ...] = ()


class LineUp(Enum):
    """Which source each sequence of a step has, where it has two."""

    SURER = "surer"  # the one that is worth more for this sequence alone
    MODEL = "model"  # a draft model takes about as long for all as for a few
    TEXT = "text"  # ... and what it takes for a few may be more than they gain


def line_up(way: LineUp, found: Sequence[Sequence[Choice]], draft_share: float) -> list[Choice]:
    """One choice for each sequence; none for those that only have what is left out.

    Args:
        way: how to choose.
        found: what there is for each sequence, its own text first.
        draft_share: of a step's time, what is left beside the draft model's.
    """
    if way is LineUp.MODEL:
        return [both[-1] for both in found]
    if way is LineUp.TEXT:
        return [both[0] for both in found if both[0].source.is_text]
    return [_surer(both[0], both[-1], draft_share) for both in found]


def _surer(text: Choice, draft: Choice, draft_share: float) -> Choice:
    """What stands in the text costs no model: the draft model must be so much surer."""
    return draft if _typical_gain(text.rate) < draft_share * _typical_gain(draft.rate) else text


def _typical_gain(rate: float) -> float:
    return 1 + expected_gain(rate, _TYPICAL_LENGTH)


def limit(choices: Iterable[Choice], text_length: int, draft_length: int) -> None:
    """Shorten choices to these lengths, by where they come from."""
    for choice in choices:
        choice.count = min(choice.count, text_length if choice.source.is_text else draft_length)

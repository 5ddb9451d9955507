"""What one sequence may get in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .drafting import Source

__all__ = ["Choice", "limit"]


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


def limit(choices: Iterable[Choice], text_length: int, draft_length: int) -> None:
    """Shorten choices to these lengths, by where they come from."""
    for choice in choices:
        choice.count = min(choice.count, text_length if choice.source.is_text else draft_length)

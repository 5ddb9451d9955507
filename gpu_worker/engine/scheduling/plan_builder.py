"""A step while it is planned."""

from __future__ import annotations

from ..plan import BlockCopy, Plan, Span
from ..sequence import Sequence
from ..speculation.controller import Choice

__all__ = ["Step"]


class Step:
    """The step being planned, what is left of its token budget, and who was displaced in it."""

    __slots__ = ("budget", "copies", "displaced", "spans", "swaps_in", "swaps_out")

    def __init__(self) -> None:
        self.budget = 0
        self.spans: list[Span] = []
        self.copies: list[BlockCopy] = []
        self.swaps_out: list[BlockCopy] = []
        self.displaced: set[Sequence] = set()
        self.swaps_in: list[BlockCopy] = []

    def plan(self) -> Plan:
        """What it is so far."""
        return Plan(
            tuple(self.spans), tuple(self.copies), tuple(self.swaps_out), tuple(self.swaps_in)
        )

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Let it compute the next tokens of a sequence."""
        start = sequence.num_computed_tokens
        self.spans.append(
            Span(sequence, start, num_tokens, start + num_tokens == sequence.num_tokens)
        )
        self.budget -= num_tokens

    def draft(self, choice: Choice) -> None:
        """Let it verify drafts behind the last token of a sequence, which it computes already."""
        span, count = self.spans[choice.index], choice.count
        self.spans[choice.index] = Span(
            span.sequence, span.start, 1, True, choice.drafts[:count], count, choice.source
        )
        self.budget -= count

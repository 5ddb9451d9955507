"""What one step computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from .sequence import Sequence

__all__ = [
    "BlockCopy",
    "ChosenDrafts",
    "DraftChooser",
    "DraftSource",
    "Plan",
    "PlanBuilder",
    "Span",
]


class DraftSource(StrEnum):
    """Where drafts come from. Longer n-gram matches are right more often, so they count apart."""

    DRAFT = "draft"
    MEMORY = "memory"
    NGRAM_SHORT = "ngram_short"
    NGRAM_MEDIUM = "ngram_medium"
    NGRAM_LONG = "ngram_long"

    @classmethod
    def of_match(cls, length: int) -> DraftSource:
        """The source of drafts that continue a match of ``length`` tokens: 2-3, 4-9, or more."""
        if length < 4:
            return cls.NGRAM_SHORT
        return cls.NGRAM_MEDIUM if length < 10 else cls.NGRAM_LONG

    @property
    def is_text(self) -> bool:
        """Whether drafts come from a text: the sequence's own, or what others have said."""
        return self is not DraftSource.DRAFT


# Never changed once made. Not frozen, because one is made for every token, and setting the fields
# of a frozen one costs four times as much.
@dataclass(slots=True)
class Span:
    """The tokens of one sequence that one step computes.

    Positions ``[start, start + num_tokens)`` are the queries. They attend causally to each other,
    and to ``[0, start)``, whose keys and values are already in the sequence's blocks. A prefill
    chunk, one decoded token, the rest after a prefix-cache hit, work repeated after a preemption:
    they differ only in these two numbers. Speculative drafts are further query tokens behind the
    end of ``token_ids``: each may become the sequence's next token or not.

    Attributes:
        sequence: whose tokens.
        start: position of the first query token; equals the sequence's ``num_computed_tokens``.
        num_tokens: number of query tokens, at least 1.
        samples: the span reaches the end of ``token_ids``, so the logits of its last row give the
            next token, whose output index is ``sequence.num_output_tokens``.
        drafts: tokens that may come next, to be verified; their positions are reserved.
        num_drafts: how many drafts are verified. With empty ``drafts`` the model side's drafter
            proposes them.
        source: where they come from; None without any.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    source: DraftSource | None = None

    @property
    def prompt_rows(self) -> range:
        """Query positions whose logits are asked for, since a token of the prompt comes next."""
        known, sequence = self.sequence.num_prompt_logprobs, self.sequence
        if known is None:
            return range(0)
        stop = min(self.start + self.num_tokens, sequence.num_prompt_tokens - 1)
        return range(max(self.start, known), stop)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block ``source`` over block ``target``, in all layers of a KV cache group.

    On the device; a swap copies between the device and the host.
    """

    source: int
    target: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        spans: at least one; each sequence appears once.
        copies: to be run before the forward pass, in order, or all reads before all writes. No
            block is a target twice, and no copy reads what an earlier one wrote. But a copy may
            write a block that an earlier one has read.
        swaps_out: from device blocks to host blocks, to be run before anything else.
        swaps_in: from host blocks to device blocks, to be run after ``swaps_out`` and before
            ``copies``.
        token_ids: of a step that was planned ahead, the token that each span computes: sampled by
            the step before, and not yet recorded in its sequence. Else empty.
    """

    spans: tuple[Span, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockCopy, ...] = ()
    swaps_in: tuple[BlockCopy, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of all spans, drafts included."""
        return sum(span.num_tokens + span.num_drafts for span in self.spans)


class ChosenDrafts(Protocol):
    """Drafts that a step verifies behind one span; see :class:`Span` for what the fields mean."""

    @property
    def index(self) -> int:
        """Index of the span."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """Tokens, at least ``count``; empty where the model side's drafter proposes them."""

    @property
    def count(self) -> int:
        """How many drafts."""

    @property
    def source(self) -> DraftSource:
        """Where they come from."""


class DraftChooser(Protocol):
    """Chooses drafts for a step; :class:`~.speculation.controller.Speculator` is one."""

    def choose(self, spans: list[Span], budget: int) -> Iterable[ChosenDrafts]:
        """Drafts for a planned step, at most ``budget`` of them together."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafting state of a sequence that has ended."""


class PlanBuilder:
    """A step while it is planned.

    Attributes:
        budget: query tokens that the step has left.
        spans, copies, swaps_out, swaps_in: as in :class:`Plan`.
        displaced: sequences that were displaced in this step.
    """

    __slots__ = ("budget", "copies", "displaced", "spans", "swaps_in", "swaps_out")

    def __init__(self) -> None:
        self.budget = 0
        self.spans: list[Span] = []
        self.copies: list[BlockCopy] = []
        self.swaps_out: list[BlockCopy] = []
        self.swaps_in: list[BlockCopy] = []
        self.displaced: set[Sequence] = set()

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the step compute the next ``num_tokens`` tokens of a sequence."""
        start = sequence.num_computed_tokens
        samples = start + num_tokens == sequence.num_tokens
        self.spans.append(Span(sequence, start, num_tokens, samples))
        self.budget -= num_tokens

    def add_drafts(self, chosen: ChosenDrafts) -> None:
        """Let the step verify drafts behind a span that computes the last token of its sequence."""
        span, count = self.spans[chosen.index], chosen.count
        self.spans[chosen.index] = Span(
            span.sequence, span.start, 1, True, chosen.drafts[:count], count, chosen.source
        )
        self.budget -= count

    def build(self) -> Plan:
        """The plan so far."""
        return Plan(
            tuple(self.spans), tuple(self.copies), tuple(self.swaps_out), tuple(self.swaps_in)
        )

"""What one step computes (`Plan`), and what it gave (`StepOutput`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.shared.protocol import TokenLogprobs

from .requests import Finish
from .sequence import Sequence
from .speculation.draft_state import Source
from .speculation.verification_cost import StepTiming

__all__ = ["BlockCopy", "Plan", "Span", "StepOutput"]


# Never changed once made. Not frozen, because one is made for every token, and setting the fields
# of a frozen one costs four times as much.
@dataclass(slots=True)
class Span:
    """The tokens of one sequence that one step computes.

    Positions ``[start, start + num_tokens)`` are the queries; they attend to positions
    ``[0, start)``, whose keys and values are in the sequence's blocks already, and causally to each
    other. A prefill chunk, one decoded token, the rest after a prefix-cache hit, work repeated
    after a preemption: they differ only in these two numbers. Speculative drafts are further query
    tokens behind the end of ``token_ids``: each may become the sequence's next token or not.

    Attributes:
        sequence: whose tokens.
        start: position of the first query token; equals the sequence's ``num_computed_tokens``.
        num_tokens: number of query tokens, at least 1.
        samples: the span reaches the end of ``token_ids``, so the logits of its last row give the
            next token, whose output index is ``sequence.num_output_tokens``.
        drafts: tokens that may come next, to be verified; their positions are reserved.
        num_drafts: how many there are. More than there are ``drafts``: the model side's drafter is
            to propose so many.
        source: where they come from; None without any.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    source: Source | None = None

    @property
    def prompt_rows(self) -> range:
        """Query positions whose logits are asked for, since a token of the prompt comes next."""
        known, sequence = self.sequence.prompt_logprobs, self.sequence
        if known is None:
            return range(0)
        stop = min(self.start + self.num_tokens, sequence.num_prompt_tokens - 1)
        return range(max(self.start, len(known)), stop)


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
        copies: to be run before the forward pass, in order, or all reads before all writes. (No
            block is a target twice, and no copy reads what an earlier one wrote; but one may write
            a block that an earlier one has read.)
        swaps_out: from device blocks to host blocks, to be run before anything else.
        swaps_in: from host blocks to device blocks, to be run after ``swaps_out`` and before
            ``copies``.
    """

    spans: tuple[Span, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockCopy, ...] = ()
    swaps_in: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of all spans, drafts included."""
        return sum(span.num_tokens + span.num_drafts for span in self.spans)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the model gave for a plan.

    Attributes:
        token_ids: one entry per span, in the plan's order: the sampled token, or ``()`` where the
            span does not sample. Where it has drafts, those that were accepted come before it.
        failures: by index of span, why its request must end; that span's tokens are not looked at.
            One request's failure leaves the others of the step alone.
        logprobs: one per token of the sequences that ask for them.
        prompt_logprobs: of sequences that ask for them, one for each of the span's
            ``prompt_rows``: of the token behind it.
        candidates: the most likely next tokens of the sequences that have ``num_candidates``, with
            the natural logarithms of their probabilities, the most likely first; fewer than that
            if no more are possible.
        moved: the plan's swaps and copies were made. If not, every span has failed.
        swap_s: seconds for which the plan's swaps held the step up; None if that is not known.
        deferred: indexes of spans that sample, but did not in this step, since what may follow was
            not known yet. Nothing is wrong with them: they sample in a later one.
        drafted: of sequences for which the drafter proposed some, how many were verified.
        draft_failed: the drafter could propose nothing, for it failed.
        timing: what the step took; None if nobody has looked.
    """

    token_ids: tuple[tuple[int, ...], ...]
    failures: Mapping[int, Finish] = field(default_factory=dict)
    logprobs: Mapping[Sequence, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    candidates: Mapping[Sequence, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    moved: bool = True
    swap_s: float | None = None
    deferred: frozenset[int] = frozenset()
    drafted: Mapping[Sequence, int] = field(default_factory=dict)
    draft_failed: bool = False
    timing: StepTiming | None = field(default=None, compare=False)
    prompt_logprobs: Mapping[Sequence, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

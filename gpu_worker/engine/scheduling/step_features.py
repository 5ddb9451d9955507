"""What a step computes, in the numbers its cost depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan

__all__ = ["StepFeatures"]


@dataclass(slots=True)
class StepFeatures:
    """The amount of work in a step.

    Attributes:
        tokens: query tokens, drafts included.
        context: tokens whose keys and values are read.
        pairs: query-key pairs of attention.
        sequences: sequences in the batch.
        chunks: of these, those with more than one token of their prompt or output to compute.
        swapped_blocks: KV blocks that are copied to the host or back before it.
        drafts: of ``tokens``, those that may turn out wrong.
    """

    tokens: int
    context: int
    pairs: float
    sequences: int
    chunks: int = 0
    swapped_blocks: int = 0
    drafts: int = 0

    @classmethod
    def of(cls, plan: Plan) -> StepFeatures:
        """The work of an engine's plan."""
        tokens = context = chunks = drafts = 0
        pairs = 0.0
        for span in plan.spans:
            chunks += span.num_tokens > 1
            drafts += span.num_drafts
            count = span.num_tokens + span.num_drafts
            stop = span.start + count
            tokens += count
            context += stop
            # Causal: the first of the chunk sees the fewest, the last one all.
            pairs += stop if count == 1 else count * (stop - (count - 1) / 2)
        swapped = len(plan.swaps_out) + len(plan.swaps_in)
        return cls(tokens, context, pairs, len(plan.spans), chunks, swapped, drafts)

"""What the model side gave for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.shared.protocol.events import TokenLogprobs

from ..requests.engine_request import Finish
from ..sequence import Sequence

__all__ = ["StepOutput", "StepTiming"]


# Never changed once made. Not frozen: one is made for every step, and setting the fields of a
# frozen one costs four times as much.
@dataclass(slots=True)
class StepTiming:
    """How long a step took.

    Attributes:
        seconds: all of it.
        draft_seconds: of those, the draft model's.
    """

    seconds: float
    draft_seconds: float = 0.0


@dataclass(slots=True)
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
        candidates: for sequences with ``num_candidates``, so many next tokens with the natural
            logarithms of their probabilities, the most likely first. Fewer if no more are possible.
        moved: the plan's swaps and copies were made. If not, every span has failed.
        swap_s: seconds for which the plan's swaps held the step up; None if that is not known.
        deferred: indexes of spans that sample, but did not in this step, since what may follow was
            not known yet. Nothing is wrong with them: they sample in a later one.
        drafted: of sequences for which the drafter proposed some, how many were verified.
        draft_failed: the drafter could propose nothing, for it failed.
        timing: what the step took; None if it was not measured.
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

"""What a worker may draft, and what it reports about its drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.protocol.states import Speculation

__all__ = ["SpeculationConfig", "SpeculationStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What may be drafted.

    Attributes:
        ngram: whether sequences may have drafts from their own text.
        memory: whether they may have drafts from what other outputs have said.
        draft: whether the model side has a draft model.
        length: drafts of each sequence in each step; None lets measurement decide.
        longest: most drafts of a sequence in one step where measurement decides.
    """

    ngram: bool = True
    memory: bool = False
    draft: bool = False
    length: int | None = None
    longest: int = 7


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals since the start, and the gain of the present steps.

    Attributes:
        drafted: verified drafts by source (``ngram`` or ``draft``) and position, where 1 is the
            first draft of a step.
        accepted: drafts that became output, by the same keys.
        gain: tokens per second measured with drafts over those without, at the last decode step's
            batch size. 1 while that size has no drafts.
    """

    drafted: Mapping[tuple[Speculation, int], int]
    accepted: Mapping[tuple[Speculation, int], int]
    gain: float

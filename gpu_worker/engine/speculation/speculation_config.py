"""What a worker may draft, and what is told about its drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.protocol import Speculation

from .verification_cost import FREE, Calibration

__all__ = ["SpeculationConfig", "SpeculationStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What may be drafted.

    Attributes:
        ngram: whether sequences may have drafts from their own text.
        draft: whether the model side has a draft model.
        length: drafts of each sequence in each step; None lets measurement decide.
        longest: most drafts of a sequence in one step, where measurement decides.
        calibration: what steps cost at start.
    """

    ngram: bool = True
    draft: bool = False
    length: int | None = None
    longest: int = 7
    calibration: Calibration = FREE


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals since the start, and what holds now.

    Attributes:
        drafted: drafts verified, by source (of matches of all lengths together) and position, where
            1 is the first draft of a step.
        accepted: those that became output, likewise.
        text_length: drafts that a sequence with a text match has in the present steps.
        draft_length: drafts that the draft model proposes for a sequence in the present steps.
        gain: tokens per second of recent steps, over what they would have been without drafts.
    """

    drafted: Mapping[tuple[Speculation, int], int]
    accepted: Mapping[tuple[Speculation, int], int]
    text_length: int
    draft_length: int
    gain: float

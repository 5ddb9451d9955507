"""The budgets and choices of a scheduler."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

from penstock.shared.errors import ConfigurationError

__all__ = ["Chunking", "PreemptionChoice", "SchedulerConfig", "require_at_least"]

PreemptionChoice = Literal["auto", "swap", "recompute"]


class Chunking(enum.StrEnum):
    """How prompts are divided among steps."""

    FIXED = "fixed"
    """No more than ``chunk_size`` tokens of one sequence in a step."""
    ADAPTIVE = "adaptive"
    """As many tokens, of all sequences together, as let a step end within ``target_itl_s``."""
    OFF = "off"
    """Not at all: a sequence is admitted once all its tokens fit into the step's budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold, and how sequences get their place in it.

    Attributes:
        num_blocks: KV blocks in the pool, or in that of the layers that see furthest back.
        max_batch_tokens: token budget: query tokens of one step, all sequences together. At least
            ``max_sequences``, so that every running sequence advances in every step.
        max_sequences: sequence budget: sequences that run at the same time.
        chunk_size: query tokens of one sequence in one step. Smaller keeps the inter-token latency
            of the others low while a long prompt is read; larger reads it in fewer steps. With
            adaptive chunking the most prompt tokens of a step.
        max_model_len: tokens of prompt and output together that the model's context holds.
        watermark: share of the pool that admission leaves available, 0 to below 1. Running
            sequences can grow into it before one must be preempted.
        chunking: whether and how prompts are divided among steps. ``off`` needs a
            ``max_batch_tokens`` of at least ``max_model_len + max_sequences``.
        target_itl_s: target for the duration of a step in which sequences decode, in seconds
            (adaptive).
        min_chunk_size: prompt tokens that a step may always compute (adaptive); at most
            ``chunk_size``.
        preemption: what becomes of a preempted sequence's KV. ``swap`` keeps it in host memory
            while that has room, ``recompute`` drops it, ``auto`` takes the cheaper (see
            ``preemption_costs``).

    Raises:
        ConfigurationError: a value is out of range, or two contradict each other.
    """

    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    chunk_size: int
    max_model_len: int
    watermark: float = 0.01
    chunking: Chunking = Chunking.FIXED
    target_itl_s: float = 0.05
    min_chunk_size: int = 16
    preemption: PreemptionChoice = "auto"

    def __post_init__(self) -> None:
        for name in ("max_sequences", "chunk_size"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("max_model_len", self.max_model_len, 2)
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigurationError(
                f"max_batch_tokens is {self.max_batch_tokens}, below max_sequences "
                f"({self.max_sequences}): every running sequence needs a token of the budget in "
                "every step; raise the one or lower the other"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigurationError(f"watermark is {self.watermark}; allowed: 0 to below 1")
        if self.chunking is Chunking.ADAPTIVE:
            self._check_adaptive()
        if self.chunking is Chunking.OFF:
            self._check_unchunked()

    def _check_unchunked(self) -> None:
        # First, since chunk_size is the whole budget where none is set.
        longest = self.max_model_len + self.max_sequences
        if self.max_batch_tokens < longest:
            raise ConfigurationError(
                f"chunking is off and max_batch_tokens is {self.max_batch_tokens}: without chunks "
                "the longest prompt and a token of every other sequence must fit into one step; "
                f"raise it to max_model_len + max_sequences ({longest}), or lower those"
            )
        if self.chunk_size < self.max_model_len:
            raise ConfigurationError(
                f"chunking is off and chunk_size is {self.chunk_size}, below max_model_len "
                f"({self.max_model_len}): leave chunk_size out, or take chunking 'fixed'"
            )

    def _check_adaptive(self) -> None:
        if not 0.0 < self.target_itl_s < math.inf:
            raise ConfigurationError(
                f"target_itl_s is {self.target_itl_s}; allowed: above 0 seconds"
            )
        if not 1 <= self.min_chunk_size <= self.chunk_size:
            raise ConfigurationError(
                f"min_chunk_size is {self.min_chunk_size}; allowed: 1 to chunk_size "
                f"({self.chunk_size})"
            )

    @property
    def max_span(self) -> int:
        """Most query tokens of one sequence in one step."""
        longest = self.max_model_len if self.chunking is Chunking.OFF else self.chunk_size
        return min(longest, self.max_batch_tokens)

    @property
    def watermark_blocks(self) -> int:
        """The watermark in blocks, rounded up."""
        return math.ceil(self.watermark * self.num_blocks)


def require_at_least(name: str, value: int, low: int) -> None:
    """Check a setting's lower bound.

    Raises:
        ConfigurationError: ``value`` is below ``low``.
    """
    if value < low:
        raise ConfigurationError(f"{name} is {value}; allowed: {low} or more")

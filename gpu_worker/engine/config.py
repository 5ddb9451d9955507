"""The limits an engine works within."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

from penstock.shared.errors import ConfigurationError

from .kv.kv_cache_groups import KVCacheGroup
from .speculation.controller import SpeculationConfig

__all__ = ["Chunking", "EngineConfig", "PolicyName", "PreemptionChoice"]

PreemptionChoice = Literal["auto", "swap", "recompute"]


class Chunking(enum.StrEnum):
    """How prompts are divided among steps."""

    FIXED = "fixed"
    """No more than ``chunk_size`` tokens of one sequence in a step."""
    ADAPTIVE = "adaptive"
    """As many as let a step end in ``target_itl_s``, of all sequences together."""
    OFF = "off"
    """Not at all: a sequence is admitted once all its tokens fit into the step's budget."""


class PolicyName(enum.StrEnum):
    """Orders of admission; each is a class of the same name in ``policies``."""

    FCFS = "fcfs"
    """First come, first served."""
    SJF = "sjf"
    """Shortest remaining first."""
    PRIORITY = "priority"
    """Waiting time, length and lane together."""
    FAIR = "fair"
    """Tenants in turns, by tokens."""
    EDF = "edf"
    """Earliest deadline first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and budgets of one engine.

    Attributes:
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool, or in that of the layers that see furthest back.
        window: tokens a token sees in these layers, itself included; None: all. Blocks that have
            left the window are given up.
        more_kv_cache_groups: pools of layers with a smaller window, where the model has such.
        max_batch_tokens: token budget: query tokens of one step, all sequences together. At least
            ``max_sequences``, so that every running sequence advances in every step.
        max_sequences: sequence budget: sequences that run at the same time.
        chunk_size: query tokens of one sequence in one step. Smaller keeps the inter-token latency
            of the others low while a long prompt is read; larger reads it in fewer steps. With
            adaptive chunking the most prompt tokens of a step.
        max_model_len: tokens of prompt and output together that the model's context holds.
        eos_token_ids: ids that end the output, unless a request ignores them. They and
            ``max_model_len`` must be the same on all workers of a model, so that a request that is
            continued elsewhere ends where it would have ended.
        vocab_size: token ids are below it; None: requests may name any.
        prefix_cache: reuse the blocks of equal prefixes.
        salt_by_tenant: only requests of the same tenant share prefixes. Costs hits; hides from one
            tenant, by time to first token, what others have asked.
        watermark: share of the pool that admission leaves available, so that those which run can
            grow for a while before one must be preempted; 0 to below 1.
        policy: in which order waiting sequences are admitted.
        max_overtake_s: seconds after a sequence within which another one must have arrived to be
            admitted before it in its lane; ``fcfs`` needs no such bound, ``edf`` only without a
            deadline, and ``fair`` bounds by it for how long a tenant waits for its turn.
        chunking: whether and how prompts are divided among steps. ``off`` needs a
            ``max_batch_tokens`` of at least ``max_model_len + max_sequences``.
        target_itl_s: seconds that a step should take in which sequences decode (adaptive).
        min_chunk_size: prompt tokens that a step may always compute (adaptive); at most
            ``chunk_size``.
        preemption: what becomes of the KV of a preempted sequence: ``swap`` keeps it in host memory
            while that has room, ``recompute`` throws it away, ``auto`` takes what costs less (see
            ``preemption``).
        num_host_blocks: blocks of host memory for swapped sequences; 0 for no swapping. As
            ``num_blocks``, of the first group.
        block_bytes: bytes of a block, to be counted when it is swapped; likewise.
        speculation: what may be drafted; None: every step gives a sequence one token.

    Raises:
        ConfigurationError: a value is out of range, or two contradict each other.
    """

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    chunk_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int | None = None
    prefix_cache: bool = True
    salt_by_tenant: bool = False
    watermark: float = 0.01
    window: int | None = None
    more_kv_cache_groups: tuple[KVCacheGroup, ...] = ()
    policy: PolicyName = PolicyName.FCFS
    max_overtake_s: float = 30.0
    chunking: Chunking = Chunking.FIXED
    target_itl_s: float = 0.05
    min_chunk_size: int = 16
    preemption: PreemptionChoice = "auto"
    num_host_blocks: int = 0
    block_bytes: int = 0
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_sequences", "chunk_size"):
            _at_least(name, getattr(self, name), 1)
        for group in self.kv_cache_groups:
            _at_least("num_blocks", group.num_blocks, 1)
            _at_least("num_host_blocks", group.num_host_blocks, 0)
            if group.window is not None:
                _at_least("window", group.window, 1)
        _at_least("max_model_len", self.max_model_len, 2)
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigurationError(
                f"max_batch_tokens is {self.max_batch_tokens}, below max_sequences "
                f"({self.max_sequences}): every running sequence needs a token of the budget in "
                "every step; raise the one or lower the other"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigurationError(f"watermark is {self.watermark}; allowed: 0 to below 1")
        if not 0.0 <= self.max_overtake_s < math.inf:
            raise ConfigurationError(
                f"max_overtake_s is {self.max_overtake_s}; allowed: 0 or more seconds"
            )
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
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """All pools, in the order of a sequence's block tables."""
        first = KVCacheGroup(self.num_blocks, self.window, self.num_host_blocks, self.block_bytes)
        return (first, *self.more_kv_cache_groups)

    @property
    def max_span(self) -> int:
        """Most query tokens of one sequence in one step."""
        longest = self.max_model_len if self.chunking is Chunking.OFF else self.chunk_size
        return min(longest, self.max_batch_tokens)

    @property
    def watermark_blocks(self) -> int:
        """The watermark in blocks, rounded up."""
        return math.ceil(self.watermark * self.num_blocks)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigurationError(f"{name} is {value}; allowed: {low} or more")

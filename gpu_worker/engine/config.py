"""Sizes, budgets and choices of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.shared.errors import ConfigurationError
from penstock.shared.policy_name import PolicyName

from .kv.kv_cache_groups import KVCacheGroup
from .scheduling.scheduler_config import SchedulerConfig, require_at_least
from .speculation.speculation_config import SpeculationConfig

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """Sizes and budgets of one engine, on top of those of its scheduler.

    Attributes:
        block_size: tokens per KV block.
        window: tokens that a token sees in the layers of ``num_blocks``, itself included; None:
            all. Blocks that have left the window are given up.
        more_kv_cache_groups: pools of layers with a smaller window, where the model has such.
        eos_token_ids: ids that end the output, unless a request ignores them. They and
            ``max_model_len`` must be the same on all workers of a model. Then a request ends at the
            same token wherever it is continued.
        vocab_size: token ids are below it; None: requests may name any.
        prefix_cache: reuse the blocks of equal prefixes.
        salt_by_tenant: only requests of the same tenant share prefixes. Costs hits; hides from one
            tenant, by time to first token, what others have asked.
        policy: in which order waiting sequences are admitted.
        max_overtake_s: a sequence may be admitted before another of its lane only if it arrived at
            most so many seconds later. ``fcfs`` ignores it, ``edf`` uses it only without a
            deadline, and ``fair`` bounds a tenant's wait for its turn by it.
        num_host_blocks: blocks of host memory for swapped sequences; 0 for no swapping. As
            ``num_blocks``, of the first group.
        block_bytes: bytes of a block of the first group, for the counts of swapped bytes.
        speculation: what may be drafted; None: every step gives a sequence one token.

    Raises:
        ConfigurationError: a value is out of range, or two contradict each other.
    """

    block_size: int
    eos_token_ids: frozenset[int]
    vocab_size: int | None = None
    prefix_cache: bool = True
    salt_by_tenant: bool = False
    window: int | None = None
    more_kv_cache_groups: tuple[KVCacheGroup, ...] = ()
    policy: PolicyName = PolicyName.FCFS
    max_overtake_s: float = 30.0
    num_host_blocks: int = 0
    block_bytes: int = 0
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require_at_least("block_size", self.block_size, 1)
        for group in self.kv_cache_groups:
            require_at_least("num_blocks", group.num_blocks, 1)
            require_at_least("num_host_blocks", group.num_host_blocks, 0)
            if group.window is not None:
                require_at_least("window", group.window, 1)
        if not 0.0 <= self.max_overtake_s < math.inf:
            raise ConfigurationError(
                f"max_overtake_s is {self.max_overtake_s}; allowed: 0 or more seconds"
            )

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """All pools, in the order of a sequence's block tables."""
        first = KVCacheGroup(self.num_blocks, self.window, self.num_host_blocks, self.block_bytes)
        return (first, *self.more_kv_cache_groups)

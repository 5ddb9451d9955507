"""Counts of the engine, for metrics and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.shared.protocol.states import Lane

from .scheduling.preemption import PreemptionKey
from .speculation.speculation_config import SpeculationStats

__all__ = ["BatcherStats", "EngineStats", "Load", "PoolUse"]


class Load(NamedTuple):
    """What decides how much more work an engine can take.

    Attributes:
        waiting: waiting sequences by lane; a lane without any may lack.
        available_tokens: tokens of new sequences for which there is room.
    """

    waiting: Mapping[Lane, int]
    available_tokens: int


class BatcherStats(NamedTuple):
    """What a batcher has in hand.

    Attributes:
        waiting: items that wait for a batch to begin.
        running: items of the batches that run.
        batches: batches that run.
        window_s: how long an item that comes now would wait for others, in seconds.
    """

    waiting: int
    running: int
    batches: int
    window_s: float


@dataclass(frozen=True, slots=True)
class PoolUse:
    """How full the pool of one KV cache group is.

    Attributes:
        window: of its layers, in tokens; None: they see all tokens.
        num_blocks: blocks in the pool.
        used_blocks: of these, held by running sequences.
        cached_blocks: of these, free and with content that could still be hit.
    """

    window: int | None
    num_blocks: int
    used_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Names without a unit are counts; those marked total only grow.

    Attributes:
        running: running sequences by lane.
        waiting: waiting sequences by lane.
        num_blocks: KV blocks in the pool; used + cached + free. In a model whose layers differ in
            their windows all pools together, here and in the next three.
        used_blocks: held by running sequences.
        cached_blocks: unused, kept for the prefix cache.
        free_blocks: empty.
        pools: use of each pool; more than one where layers differ in their windows.
        available_tokens: tokens of new sequences for which there is room.
        evictions: total cached blocks given away because free ones ran out.
        steps: total steps collected.
        computed_tokens: total query tokens computed, repeated ones included.
        output_tokens: total tokens that became output; what drafts gave behind its end is dropped.
        prefix_query_tokens: total tokens looked up in the prefix cache at admission.
        prefix_hit_tokens: total of those that were found.
        preemptions: total by the victim's lane, the cause and the mode.
        preempted_tokens: total computed tokens of their victims, by the same keys. The prefix
            cache may give back part of those not swapped at the next admission.
        num_host_blocks: blocks of host memory for swapped sequences.
        used_host_blocks: of these, holding one.
        swapped_out_blocks: total blocks copied to the host.
        swapped_in_blocks: total blocks copied back.
        swapped_out_bytes: the same in bytes; 0 if the engine was not told those of a block.
        swapped_in_bytes: bytes of ``swapped_in_blocks``.
        swap_refusals: total sequences that were to be swapped, and for which too few host blocks
            were free.
        speculation: drafts and what became of them; None where nothing is drafted.
    """

    running: Mapping[Lane, int]
    waiting: Mapping[Lane, int]
    num_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    pools: tuple[PoolUse, ...]
    available_tokens: int
    evictions: int
    steps: int
    computed_tokens: int
    output_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: Mapping[PreemptionKey, int]
    preempted_tokens: Mapping[PreemptionKey, int]
    num_host_blocks: int
    used_host_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    swap_refusals: int
    speculation: SpeculationStats | None = None

"""Lets waiting sequences run: which of them fit, beside which reserve, and with what they begin."""

from __future__ import annotations

from operator import eq

from ..plan import PlanBuilder
from ..sequence import Sequence
from .scheduler_config import Chunking
from .scheduler_state import SchedulerState

__all__ = ["Admission"]


class Admission:
    """Admits in the policy's order, by what is free now and not by the worst case.

    A sequence is admitted when all tokens it has fit beside a small reserve, and gets blocks for
    them at once. Its growth is unknown, so nothing is reserved for that. It begins with what a
    running sibling shares, or else the prefix cache has, and then what the host kept of it.

    Args:
        state: of the scheduler.

    Attributes:
        prefix_query_tokens: tokens looked up in the prefix cache at admission.
        prefix_hit_tokens: tokens that were found there.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def admit_waiting(self, step: PlanBuilder) -> None:
        """Admit in order until a budget is used up or the first in line does not fit.

        Without chunks a sequence must also fit into what is left of this step.
        """
        config, running = self._state.config, self._state.running
        whole = config.chunking is Chunking.OFF
        while step.budget and len(running) < config.max_sequences:
            sequence = self._state.waiting.peek()
            if sequence is None or (whole and sequence.num_tokens > step.budget):
                return
            # Thrash guard, part 1: a sequence displaced in this step does not come back in it. It
            # might fit, since others now share some of its blocks.
            if sequence in step.displaced:
                return
            if not self.try_admit(sequence, self.spare(sequence, len(running)), step):
                return

    def try_admit(self, sequence: Sequence, spare: int, step: PlanBuilder) -> bool:
        """Let a waiting sequence run, and plan what it computes; False if it does not fit."""
        if not self.try_enter(sequence, spare, step):
            return False
        most = min(self._state.config.chunk_size, step.budget)
        num_missing = sequence.num_tokens - sequence.num_computed_tokens
        step.add(sequence, min(sequence.chunk(num_missing), most))
        return True

    def try_enter(self, sequence: Sequence, spare: int, step: PlanBuilder) -> bool:
        """Let a waiting sequence run, without a span in the step yet; False if it does not fit.

        Args:
            sequence: the first in line.
            spare: blocks that must be left over.
            step: gets the copies.
        """
        kv = self._state.kv
        common = self._longest_common(sequence) if sequence.siblings else None
        if common is None or not kv.try_join(sequence, *common, spare, step.copies):
            if not kv.try_admit(sequence, spare):
                return False
            self._count_hits(sequence)
        if sequence.host_blocks:
            kv.swap_in(sequence, step.swaps_in)
        self._state.waiting.admit(sequence)
        self._state.running.add(sequence)
        return True

    def spare(self, sequence: Sequence, num_running: int) -> int:
        """Blocks that must be left over when ``sequence`` joins ``num_running`` running ones."""
        if num_running == 0:
            return 0  # no sequence needs them, and the pool holds any one sequence
        # Thrash guard, part 2: a preempted sequence comes back only when every running one can
        # still grow by a block. That is about block_size steps before KV is short again.
        growth = num_running if sequence.num_preemptions else 0
        return self._state.config.watermark_blocks + growth

    def _count_hits(self, sequence: Sequence) -> None:
        num_cached = sequence.num_computed_tokens
        self.prefix_query_tokens += sequence.num_tokens
        self.prefix_hit_tokens += num_cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
        elif self._state.preemption_costs is not None:
            self._state.preemption_costs.observe_return(sequence.num_tokens, num_cached)

    def _longest_common(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """The running sibling that has computed most of what ``sequence`` begins with.

        The last token is left out, since its logits are needed. None if the prefix cache or the
        host has as much; the cache does for a sequence that was preempted a moment ago.
        """
        most = max(self._state.kv.num_cached_tokens(sequence), sequence.num_swapped_tokens)
        best = None
        for sibling in sequence.siblings:
            end = min(sibling.num_computed_tokens, sequence.num_tokens - 1)
            if end > most:  # else it cannot have more in common, or does not run
                length = _num_equal(sequence.token_ids[:end], sibling.token_ids[:end])
                best, most = (sibling, length) if length > most else (best, most)
        return None if best is None else (best, most)


def _num_equal(one: list[int], other: list[int]) -> int:
    """Length of the common begin of two lists of equal length."""
    if one == other:  # the usual case, and much faster
        return len(one)
    return list(map(eq, one, other)).index(False)

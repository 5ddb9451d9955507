"""Letting those who wait run: who fits, beside which reserve, and with what they begin."""

from __future__ import annotations

from operator import eq

from ..config import Chunking, EngineConfig
from ..kv.host_pool import HostPool
from ..kv.kv_manager import KVManager
from ..sequence import Sequence
from .plan_builder import Step
from .policies import Policy
from .preemption_costs import PreemptionCosts
from .running import Running

__all__ = ["Admission"]


class Admission:
    """Admits in the policy's order, by what is free now and not by the worst case.

    A sequence is admitted when all tokens it has fit beside a small reserve, and gets blocks for
    them at once; how far it will grow is not known, and not reserved for. It begins with what a
    running sibling shares, or else the prefix cache has, and then what the host kept of it.

    Args:
        costs: learns how much of the preempted the prefix cache gives back; None: nobody asks.

    Attributes:
        prefix_query_tokens: tokens looked up in the prefix cache at admission.
        prefix_hit_tokens: those that were found.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        policy: Policy,
        host: HostPool,
        running: Running,
        costs: PreemptionCosts | None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._policy = policy
        self._host = host
        self._running = running
        self._costs = costs
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def admit_waiting(self, step: Step) -> None:
        """Admit in order until a budget is used up or the first in line does not fit.

        Without chunks one must also fit into what is left of this step.
        """
        whole = self._config.chunking is Chunking.OFF
        while step.budget and len(self._running) < self._config.max_sequences:
            sequence = self._policy.peek()
            if sequence is None or (whole and sequence.num_tokens > step.budget):
                return
            # Thrash guard, part 1: who was displaced in this step does not come back in it, though
            # it may fit, as others now have some of its blocks as well.
            if sequence in step.displaced:
                return
            if not self.try_admit(sequence, self.spare(sequence, len(self._running)), step):
                return

    def try_admit(self, sequence: Sequence, spare: int, step: Step) -> bool:
        """Let a waiting sequence run, and plan what it computes; False if it does not fit."""
        if not self.try_enter(sequence, spare, step):
            return False
        num_missing = sequence.num_tokens - sequence.num_computed_tokens
        step.add(sequence, min(sequence.chunk(num_missing), self._config.chunk_size, step.budget))
        return True

    def try_enter(self, sequence: Sequence, spare: int, step: Step) -> bool:
        """Let a waiting sequence run, without a part in the step yet; False if it does not fit.

        Args:
            sequence: the first in line.
            spare: blocks that must be left over.
            step: gets the copies.
        """
        common = self._longest_common(sequence) if sequence.siblings else None
        if common is None or not self._kv.try_join(sequence, *common, spare, step.copies):
            if not self._kv.try_admit(sequence, spare):
                return False
            num_cached = sequence.num_computed_tokens
            self.prefix_query_tokens += sequence.num_tokens
            self.prefix_hit_tokens += num_cached
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            elif self._costs is not None:
                self._costs.observe_return(sequence.num_tokens, num_cached)
        if sequence.host_blocks:
            self._host.restore(sequence, step.swaps_in)
        self._policy.admit(sequence)
        self._running.add(sequence)
        return True

    def spare(self, sequence: Sequence, num_running: int) -> int:
        """Blocks that must be left over when ``sequence`` is admitted beside so many that run."""
        if num_running == 0:
            return 0  # there is nobody who could need them, and the pool holds any one sequence
        # Thrash guard, part 2: who was preempted comes back only when all that run can grow by a
        # block, i.e. for about block_size steps, before KV is short again.
        growth = num_running if sequence.num_preemptions else 0
        return self._config.watermark_blocks + growth

    def _longest_common(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """The running sibling that has computed most of what ``sequence`` begins with.

        The last token is left out, since its logits are needed. None if the prefix cache has as
        much, as it does of one that was preempted a moment ago, or the host.
        """
        most = max(self._kv.num_cached_tokens(sequence), sequence.num_swapped_tokens)
        best = None
        for sibling in sequence.siblings:
            end = min(sibling.num_computed_tokens, sequence.num_tokens - 1)
            if end > most:  # else it cannot have more in common, or does not run
                length = _num_equal(sequence.token_ids[:end], sibling.token_ids[:end])
                best, most = (sibling, length) if length > most else (best, most)
        return None if best is None else (best, most)


def _num_equal(one: list[int], other: list[int]) -> int:
    """Length of the common begin of two lists of equal length."""
    if one == other:  # as a rule, and much faster
        return len(one)
    return list(map(eq, one, other)).index(False)

"""Taking the blocks of running sequences back: from whom, and what becomes of their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..config import EngineConfig
from ..kv.host_pool import HostPool
from ..kv.kv_manager import KVManager
from ..plan import BlockCopy
from ..sequence import Sequence, SequenceStatus
from ..stats import Preemption, PreemptionCause, PreemptionMode
from .plan_builder import Step
from .policies import Policy
from .preemption_costs import PreemptionCosts
from .running import Running

__all__ = ["Preemptor", "by_loss"]


class Preemptor:
    """Preempts running sequences, and counts it.

    A preempted sequence waits at the front of its lane. Its keys and values are kept in host memory
    or thrown away; either way it comes back by the same door as all others, with what the prefix
    cache still has of it, what the host kept, and the rest to compute.

    A sequence that was already planned in a step is never preempted in it: blocks are taken only
    from those behind, in the order of service, and from the sequence that needs them itself. So
    plans and block copies need not be taken back.

    Args:
        costs: chooses between swap and recompute; None: ``config`` has chosen.

    Attributes:
        counts: preemptions by the victim's lane, the cause and the mode.
        tokens: computed tokens of their victims.
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
        self._kv = kv
        self._policy = policy
        self._host = host
        self._running = running
        self._costs = costs
        self._swaps = host.num_blocks > 0 and config.preemption != "recompute"
        self.counts: Counter[Preemption] = Counter()
        self.tokens: Counter[Preemption] = Counter()

    def preempt(self, sequence: Sequence, cause: PreemptionCause, step: Step) -> None:
        """Take the blocks back. Tokens stay; their keys and values are kept elsewhere, or not."""
        saved = self._try_swap_out(sequence, step.swaps_out)
        mode = PreemptionMode.SWAP if saved else PreemptionMode.RECOMPUTE
        self.counts[sequence.lane, cause, mode] += 1
        self.tokens[sequence.lane, cause, mode] += sequence.num_computed_tokens
        self._running.remove(sequence)
        self._kv.release(sequence)
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._policy.put_back(sequence)

    def make_room(self, sequence: Sequence, stop: int, behind: list[Sequence], step: Step) -> bool:
        """Preempt until ``sequence`` can have its blocks; False if it had to give up its own.

        Args:
            sequence: runs, and is short of blocks.
            stop: one past the last position that it is to write.
            behind: those behind it in the order of service.
            step: gets the copies.
        """
        self._kv.drop_unneeded(self._running)
        candidates = (s for s in reversed(behind) if s.status is SequenceStatus.RUNNING)
        victims = iter(by_loss(candidates))
        while not self._kv.try_reserve(sequence, stop, step.copies):
            victim = next(victims, None)
            if victim is None:
                self.preempt(sequence, PreemptionCause.YIELDED, step)
                return False
            self.preempt(victim, PreemptionCause.EARLIER, step)
        return True

    def _try_swap_out(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        if not self._swaps:
            return False
        if self._costs is not None and not self._costs.prefers_swap(
            sequence.num_computed_tokens, self._host.num_needed(sequence)
        ):
            return False
        return self._host.try_save(sequence, copies)


def by_loss(candidates: Iterable[Sequence]) -> list[Sequence]:
    """Victims in their order: last in lane first, then the least work lost.

    Args:
        candidates: of equals the first one goes first; so give the one admitted last first.
    """
    return sorted(candidates, key=lambda s: (-s.rank, s.num_computed_tokens))

"""Takes blocks and places from running sequences: from which ones, and what becomes of their KV."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable

from penstock.shared.protocol.states import Lane

from ..plan import BlockCopy, PlanBuilder
from ..sequence import Sequence, SequenceStatus
from .admission import Admission
from .scheduler_config import Chunking
from .scheduler_state import SchedulerState

__all__ = ["Preemption", "PreemptionCause", "PreemptionKey", "PreemptionMode"]


class PreemptionCause(enum.StrEnum):
    """Why a sequence lost its blocks."""

    EARLIER = "earlier"
    """A sequence before it in the order of service (more urgent, or admitted earlier) needed KV."""
    URGENT = "urgent"
    """Waiting work of a more urgent lane took its place or its KV."""
    YIELDED = "yielded"
    """It needed KV itself, and only sequences before it had any."""


class PreemptionMode(enum.StrEnum):
    """What became of the keys and values of a preempted sequence."""

    RECOMPUTE = "recompute"
    """Thrown away, to be computed again."""
    SWAP = "swap"
    """Copied to host memory, to be copied back."""


PreemptionKey = tuple[Lane, PreemptionCause, PreemptionMode]
"""How preemptions are counted; the lane is the victim's."""


class Preemption:
    """Preempts running sequences when KV is short, or when more urgent work waits.

    A preempted sequence waits at the front of its lane. Its keys and values are kept in host memory
    or thrown away. It is admitted like any other, with what the prefix cache still has of it, what
    the host kept, and the rest to compute.

    A step never preempts a sequence that it has already planned. It takes blocks only from the
    sequence that needs them, and from those behind it in the order of service. So plans and block
    copies need not be taken back.

    Args:
        state: of the scheduler.
        admission: lets in the sequence for which others were displaced.

    Attributes:
        counts: preemptions by the victim's lane, the cause and the mode.
        tokens: computed tokens of their victims.
    """

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._swaps = state.kv.num_host_blocks > 0 and state.config.preemption != "recompute"
        self.counts: Counter[PreemptionKey] = Counter()
        self.tokens: Counter[PreemptionKey] = Counter()

    def preempt(self, sequence: Sequence, cause: PreemptionCause, step: PlanBuilder) -> None:
        """Take the blocks back. Tokens stay; their keys and values are swapped out or dropped."""
        saved = self._swaps and self._try_swap_out(sequence, step.swaps_out)
        mode = PreemptionMode.SWAP if saved else PreemptionMode.RECOMPUTE
        self.counts[sequence.lane, cause, mode] += 1
        self.tokens[sequence.lane, cause, mode] += sequence.num_computed_tokens
        self._state.running.remove(sequence)
        self._state.kv.release(sequence)
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._state.waiting.put_back(sequence)

    def make_room(
        self, sequence: Sequence, stop: int, behind: list[Sequence], step: PlanBuilder
    ) -> bool:
        """Preempt until ``sequence`` can have its blocks; False if it had to give up its own.

        Args:
            sequence: runs, and is short of blocks.
            stop: one past the last position that it is to write.
            behind: those behind it in the order of service.
            step: gets the copies.
        """
        kv = self._state.kv
        kv.drop_unneeded(self._state.running)
        candidates = (s for s in reversed(behind) if s.status is SequenceStatus.RUNNING)
        victims = iter(_by_loss(candidates))
        while not kv.try_reserve(sequence, stop, step.copies):
            victim = next(victims, None)
            if victim is None:
                self.preempt(sequence, PreemptionCause.YIELDED, step)
                return False
            self.preempt(victim, PreemptionCause.EARLIER, step)
        return True

    def displace(self, step: PlanBuilder) -> None:
        """Let the first in line take the place of less urgent work, before anything is planned.

        It preempts as few victims as possible, and none if the new sequence would not start in this
        step. Three resources can be short, and each is checked:

        - places: the new sequence takes one from those it may displace;
        - blocks: the victims' own blocks become free. The new sequence's blocks, the reserve, and
          what the others need to go on in this step must all fit. So this step
          preempts no other sequence, and never the new one;
        - tokens of the step: the budget has one for each running sequence, the new one included.
          Without chunks it must hold the whole prompt beside what the others compute.
        """
        state = self._state
        head = state.waiting.peek()
        if head is None:
            return
        running = state.running.less_urgent(head.rank)
        victims = _by_loss(s for s in running if state.waiting.may_displace(head, s))
        if not victims:
            return
        state.kv.drop_unneeded(state.running)
        count = self._victims_needed(head, victims)
        if not count:
            return
        for victim in victims[:count]:
            self.preempt(victim, PreemptionCause.URGENT, step)
        step.displaced.update(victims[:count])
        self._admission.try_enter(head, self._admission.spare(head, len(state.running)), step)

    def _victims_needed(self, head: Sequence, victims: list[Sequence]) -> int | None:
        """How many must go for ``head`` to start; None if it could not even without them all."""
        config, num_running = self._state.config, len(self._state.running)

        def spare(gone: int) -> int:
            return self._admission.spare(head, num_running - gone)

        count = self._state.kv.victims_needed(head, victims, spare, self._stops)
        if count is None:
            return None
        if num_running >= config.max_sequences:
            count = max(count, 1)
        if config.chunking is Chunking.OFF:
            gone = set(victims[:count])
            stops = self._stops().items()
            others = sum(stop - s.num_computed_tokens for s, stop in stops if s not in gone)
            if others + head.num_tokens > config.max_batch_tokens:
                return None
        return count

    def _stops(self) -> dict[Sequence, int]:
        """Per running sequence one past the last position that a step with budget writes."""
        longest, stops = self._state.config.chunk_size, {}
        for sequence in self._state.running:
            start = sequence.num_computed_tokens
            stops[sequence] = start + min(sequence.chunk(sequence.num_tokens - start), longest)
        return stops

    def _try_swap_out(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        kv, costs = self._state.kv, self._state.preemption_costs
        if costs is not None and not costs.prefers_swap(
            sequence.num_computed_tokens, kv.num_swap_blocks(sequence)
        ):
            return False
        return kv.try_swap_out(sequence, copies)


def _by_loss(candidates: Iterable[Sequence]) -> list[Sequence]:
    """Victims in their order: the last lane first, in a lane the least work lost first.

    Args:
        candidates: the first of equals goes first; so give the one admitted last first.
    """
    return sorted(candidates, key=lambda s: (-s.rank, s.num_computed_tokens))

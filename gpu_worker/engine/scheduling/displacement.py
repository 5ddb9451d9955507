"""Urgent work that waits takes the place of less urgent work that runs."""

from __future__ import annotations

from ..config import Chunking, EngineConfig
from ..kv.kv_manager import KVManager
from ..sequence import Sequence
from ..stats import PreemptionCause
from .admission import Admission
from .plan_builder import Step
from .policies import Policy
from .preemption import Preemptor, by_loss
from .running import Running

__all__ = ["Displacement"]


class Displacement:
    """Preempts for the first in line if it is more urgent than what stands in its way.

    As few as it takes, and all or nothing: nobody is preempted for a sequence that does not start
    in this very step. Three things are short, and each is looked at:

    - places: of those it may displace it takes one's;
    - blocks: what the victims have alone becomes free; what the head needs, what the reserve is,
      and what those who go on need to go on in this step must be there. So none of these is
      preempted in this step, least of all the head;
    - tokens of the step: the budget has one for each that runs, the head included. Without chunks
      it needs as many as its prompt has beside what those who go on compute.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        policy: Policy,
        running: Running,
        preemptor: Preemptor,
        admission: Admission,
    ) -> None:
        self._config = config
        self._kv = kv
        self._policy = policy
        self._running = running
        self._preemptor = preemptor
        self._admission = admission

    def displace(self, step: Step) -> None:
        """Do so where it helps, before anything is planned; who is let in runs from now on."""
        head = self._policy.peek()
        victims = [] if head is None else self._behind(head)
        if head is None or not victims:
            return
        self._kv.drop_unneeded(self._running)
        count = self._victims_needed(head, victims)
        if not count:
            return
        for victim in victims[:count]:
            self._preemptor.preempt(victim, PreemptionCause.URGENT, step)
        step.displaced.update(victims[:count])
        self._admission.try_enter(head, self._admission.spare(head, len(self._running)), step)

    def _behind(self, head: Sequence) -> list[Sequence]:
        """What ``head`` may displace, in the order of victims."""
        running = self._running.less_urgent(head.rank)
        return by_loss(s for s in running if self._policy.may_displace(head, s))

    def _victims_needed(self, head: Sequence, victims: list[Sequence]) -> int | None:
        """How many must go for ``head`` to start; None if it could not even without them all."""
        num_running = len(self._running)

        def spare(gone: int) -> int:
            return self._admission.spare(head, num_running - gone)

        count = self._kv.victims_needed(head, victims, spare, self._stops)
        if count is None:
            return None
        if num_running >= self._config.max_sequences:
            count = max(count, 1)
        if self._config.chunking is Chunking.OFF:
            gone = set(victims[:count])
            stops = self._stops().items()
            others = sum(stop - s.num_computed_tokens for s, stop in stops if s not in gone)
            if others + head.num_tokens > self._config.max_batch_tokens:
                return None
        return count

    def _stops(self) -> dict[Sequence, int]:
        """For all that run, one past the last position that a step writes if the budget allows."""
        longest, stops = self._config.chunk_size, {}
        for sequence in self._running:
            start = sequence.num_computed_tokens
            stops[sequence] = start + min(sequence.chunk(sequence.num_tokens - start), longest)
        return stops

"""Decides, step by step, which sequences compute how many tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.states import Lane

from ..plan import BlockCopy, DraftChooser, Plan, PlanBuilder, Span
from ..sequence import Sequence, SequenceStatus
from .adaptive_chunks import AdaptiveChunks
from .admission import Admission
from .preemption import Preemption, PreemptionCause, PreemptionKey
from .preemption_costs import PreemptionCosts
from .scheduler_config import Chunking, SchedulerConfig
from .scheduler_state import SchedulerState

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .policies.policy import Policy

__all__ = ["Scheduler"]


class Scheduler:
    """Gives every step's budgets to sequences; admits, preempts and forgets them.

    Iteration-level scheduling (Orca, Yu et al., 2022) with chunked prefill mixed into decodes
    (Sarathi-Serve, Agrawal et al., 2024).

    Each step first lets urgent waiting work displace less urgent running work (``preemption``).
    Then it continues what runs, and admits what waits in the order of the policy (``admission``).
    It serves what runs in the *order of service* (``running``). When KV is short, a sequence may
    take blocks only from those behind it in that order (``preemption``). Three things follow:

    - no sequence is preempted for a less urgent one;
    - the first in the order advances in every step until it ends, then the next is first. So work
      always gets done, and every running sequence ends;
    - a sequence that was already planned in this step is never preempted in it, so plans and block
      copies need not be taken back.

    Every sequence fits into the pool alone, and so do all beams of one search together: the engine
    refuses or ends those that would not. So a plan is empty only if nothing runs and nothing waits.

    Sequences of one request are admitted and preempted one by one. One that begins like a sibling
    which runs shares its blocks. Beams advance together. A beam that waits for the others to catch
    up keeps its blocks and its place, and takes no part in the step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        policy: Policy,
        drafts: DraftChooser | None = None,
    ) -> None:
        step_costs = AdaptiveChunks(
            config.target_itl_s, least=config.min_chunk_size, most=config.chunk_size
        )
        adaptive = config.chunking is Chunking.ADAPTIVE
        chooses = config.preemption == "auto" and kv.num_host_blocks > 0
        self._chunks = step_costs if adaptive else None
        self._step_costs = step_costs if adaptive or chooses else None
        self._drafts = drafts
        self._state = SchedulerState(
            config, kv, policy, PreemptionCosts(step_costs) if chooses else None
        )
        self._admission = Admission(self._state)
        self._preemption = Preemption(self._state, self._admission)

    @property
    def preemptions(self) -> Counter[PreemptionKey]:
        """Number of preemptions by the victim's lane, the cause and the mode."""
        return self._preemption.counts

    @property
    def preempted_tokens(self) -> Counter[PreemptionKey]:
        """Computed tokens of their victims."""
        return self._preemption.tokens

    @property
    def prefix_query_tokens(self) -> int:
        """Tokens looked up in the prefix cache at admission."""
        return self._admission.prefix_query_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens that were found there."""
        return self._admission.prefix_hit_tokens

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        self._state.waiting.add(sequence)

    def add_next(self, sequence: Sequence) -> None:
        """The same for one whose request is being served: it goes before all others of its lane."""
        self._state.waiting.put_back(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence run that has one token more than was computed for ``parent``.

        It waits before all others of its lane if the sequence budget is used up, or the parent does
        not run or has computed less.
        """
        full = len(self._state.running) >= self._state.config.max_sequences
        if full or parent.num_computed_tokens != child.num_tokens - 1:
            self._state.waiting.put_back(child)
            return
        self._state.kv.fork(parent, child)
        self._state.running.add(child)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended or was aborted: forget it and free its blocks."""
        if sequence.status is SequenceStatus.WAITING:
            self._state.waiting.remove(sequence)
            self._state.kv.drop_swapped(sequence)
        else:
            self._state.running.remove(sequence)
            self._state.kv.release(sequence)
            self._state.waiting.end(sequence)
        sequence.status = SequenceStatus.FINISHED
        if self._drafts is not None:
            self._drafts.forget(sequence)

    def schedule(self) -> Plan | None:
        """Plan the next step; None if there is nothing to do."""
        step = PlanBuilder()
        self._preemption.displace(step)
        step.budget = self._token_budget()
        all_kept = self._continue_running(step)
        # Thrash guard, part 1: what was just taken from one is not given to another.
        if all_kept:
            self._admission.admit_waiting(step)
            if self._drafts is not None and step.budget:
                self._add_drafts(step, self._drafts)
        if not step.spans:
            self._complete_first_group(step)
        return step.build() if step.spans else None

    def schedule_ahead(self, before: Plan) -> Plan | None:
        """Plan the step after ``before``, whose output is not known yet.

        Args:
            before: all its sequences are taken to run on by one token.

        Returns:
            The plan, which moves no blocks. None if another one runs or may be admitted, or if
            blocks are short.
        """
        state, spans = self._state, before.spans
        if len(state.running) != len(spans) or self._may_admit():
            return None
        next_spans: list[Span] = []
        copies: list[BlockCopy] = []
        for span in spans:
            sequence, start = span.sequence, span.start + span.num_tokens
            writable = sequence.num_writable_tokens
            # Its next block, and no other: a shared one would have to be copied, and a plan that
            # may be dropped must not copy.
            if start >= writable and (
                start > writable or not state.kv.try_reserve(sequence, start + 1, copies)
            ):
                return None
            next_spans.append(Span(sequence, start, 1, True))
        if copies:
            raise IntegrityError("a new block is a copy")
        return Plan(tuple(next_spans))

    def _may_admit(self) -> bool:
        """Whether one that waits could start in the next step if all that run go on."""
        state = self._state
        head = state.waiting.peek()
        if head is None:
            return False
        if len(state.running) < state.config.max_sequences:
            return True
        return any(
            state.waiting.may_displace(head, s) for s in state.running.less_urgent(head.rank)
        )

    def observe(self, plan: Plan, seconds: float) -> None:
        """The step of ``plan`` took so long: chunks, preemptions and waiting are measured by it."""
        self._state.waiting.elapse(seconds)
        if self._step_costs is not None:
            self._step_costs.observe(plan, seconds)

    def observe_swaps(self, plan: Plan, seconds: float) -> None:
        """The swaps of ``plan`` held its step up for so long."""
        costs = self._state.preemption_costs
        if costs is not None and (plan.swaps_out or plan.swaps_in):
            costs.observe_swaps(len(plan.swaps_out), len(plan.swaps_in), seconds)

    def _token_budget(self) -> int:
        """Query tokens of the next step; one of each running sequence is always in it."""
        most = self._state.config.max_batch_tokens
        if self._chunks is None:
            return most
        running = len(self._state.running)
        return min(most, running + self._chunks.limit(running))

    def running(self) -> Iterator[Sequence]:
        """The running sequences, in the order of service."""
        return iter(self._state.running)

    def num_running(self, lane: Lane) -> int:
        """How many run in one lane."""
        return self._state.running.count(lane)

    def _continue_running(self, step: PlanBuilder) -> bool:
        """Plan what runs; False if KV was short, so that some may have been preempted."""
        queue = self._state.running.in_order()
        all_kept, chunk_size = True, self._state.config.chunk_size
        spans, budget, num_behind = step.spans, step.budget, len(queue)
        for sequence in queue:
            num_behind -= 1
            if not all_kept and sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            # One token of the budget is kept for each sequence behind, so that no decode waits for
            # a prefill. (The budget is at least what runs, so at least one is left for this one.)
            start = sequence.num_computed_tokens
            num_tokens = len(sequence.token_ids) - start
            if num_tokens == 1 and start < sequence.num_writable_tokens:
                # What nearly all do in nearly every step, without a call.
                spans.append(Span(sequence, start, 1, True))
                budget -= 1
                continue
            if num_tokens == 0:
                continue  # a beam that waits for the others of its group
            num_tokens = min(sequence.chunk(num_tokens), budget - num_behind, chunk_size)
            stop = start + num_tokens
            if not self._state.kv.try_reserve(sequence, stop, step.copies):
                all_kept = False
                behind = queue[len(queue) - num_behind :]
                if not self._preemption.make_room(sequence, stop, behind, step):
                    continue
            spans.append(Span(sequence, start, num_tokens, stop == sequence.num_tokens))
            budget -= num_tokens
        step.budget = budget
        return all_kept

    def _complete_first_group(self, step: PlanBuilder) -> None:
        """All that run are beams that wait for siblings: let the first search go on.

        Nothing was planned, so everything that runs may lose its blocks. Then the rest of the first
        one's group fits, as the engine refuses a search that does not fit alone.
        """
        first = next(iter(self._state.running), None)
        if first is None:
            return
        for sequence in self._state.running.in_order():
            if sequence not in first.siblings:
                self._preemption.preempt(sequence, PreemptionCause.YIELDED, step)
        whole = self._state.config.chunking is Chunking.OFF
        for sequence in first.siblings:
            fits = sequence.num_tokens <= step.budget if whole else step.budget > 0
            if fits and sequence.status is SequenceStatus.WAITING:
                self._admission.try_admit(sequence, 0, step)

    def _add_drafts(self, step: PlanBuilder, chooser: DraftChooser) -> None:
        """Let the step verify drafts with what is left of budget and blocks.

        A draft never preempts a sequence, and never makes one wait. Blocks of refused drafts go
        back after the step.
        """
        for chosen in chooser.choose(step.spans, step.budget):
            span, count = step.spans[chosen.index], chosen.count
            sequence, stop = span.sequence, span.start + 1 + count
            if stop <= sequence.num_writable_tokens or self._state.kv.try_reserve(
                sequence, stop, step.copies
            ):
                step.add_drafts(chosen)

    def check_integrity(self, live: set[Sequence]) -> None:
        """Check queues and blocks against the sequences the engine knows.

        Raises:
            IntegrityError: a sequence is lost or in two places, or the blocks do not add up.
        """
        running, waiting = self._state.running.in_order(), list(self._state.waiting)
        if len(running) + len(waiting) != len(live) or {*running, *waiting} != live:
            raise IntegrityError(f"{running=} and {waiting=} are not the live sequences {live}")
        for sequence in live:
            is_running = sequence in self._state.running
            status = SequenceStatus.RUNNING if is_running else SequenceStatus.WAITING
            if sequence.status is not status:
                raise IntegrityError(f"{sequence} should be {status.value}")
            if not is_running and (sequence.block_tables or sequence.num_computed_tokens):
                raise IntegrityError(f"{sequence} waits and holds blocks")
            if is_running and (sequence.host_blocks or sequence.num_swapped_tokens):
                raise IntegrityError(f"{sequence} runs and is kept on the host")
            if sequence.num_tokens > self._state.kv.capacity_tokens:
                raise IntegrityError(f"{sequence} can never fit into the KV cache")
        if len(running) > self._state.config.max_sequences:
            raise IntegrityError(f"{len(running)} sequences run")
        self._state.kv.check_integrity(running, waiting)

"""Decides, step by step, which sequences compute how many tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import eq

from penstock.shared.errors import IntegrityError
from penstock.shared.protocol import Lane

from .chunking import AdaptiveChunks
from .config import Chunking, EngineConfig
from .hybrid_blocks import Blocks
from .plan import BlockCopy, Plan, Span
from .policies import Policy
from .preemption import PreemptionCosts
from .sequence import Sequence, SequenceStatus
from .speculation import Speculator
from .stats import Preemption, PreemptionCause, PreemptionMode
from .step import Step
from .swap import HostPool

__all__ = ["Scheduler"]


class Scheduler:
    """Gives every step's budgets to sequences; admits, preempts and forgets them.

    Iteration-level scheduling (Orca, Yu et al., 2022) with chunked prefill mixed into decodes
    (Sarathi-Serve, Agrawal et al., 2024).

    Each step first lets urgent work that waits take the place of less urgent work that runs, then
    continues what runs, then admits what waits in the order of the policy. Running sequences are
    served in the *order of service*, whatever the policy: by lane, and inside a lane as they were
    admitted. When KV is short, a sequence may take blocks only from those behind it in that order.
    Three things follow:

    - nobody is preempted for somebody less urgent;
    - the first in the order advances in every step until it ends, then the next is the first: work
      always gets done, and whoever runs will end;
    - a sequence that was already planned in this step is never preempted in it, so plans and block
      copies need not be taken back.

    Every sequence fits into the pool alone, and so do all beams of one search together: the engine
    refuses or ends those that would not. So a plan is empty only if nothing runs and nothing waits.

    Sequences of one request are admitted and preempted one by one. One that begins like a sibling
    which runs shares its blocks. Beams advance together: one that has nothing to compute until the
    others have caught up keeps its blocks and its place, and takes no part in the step.

    A preempted sequence waits at the front of its lane. Its keys and values are kept in host
    memory or thrown away; either way it comes back by the same door, with what the prefix cache
    still has of it, what the host kept, and the rest to compute.

    Attributes:
        preemptions: number of preemptions by the victim's lane, the cause and the mode.
        preempted_tokens: computed tokens of their victims.
        prefix_query_tokens: tokens looked up in the prefix cache at admission.
        prefix_hit_tokens: those that were found.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: Blocks,
        policy: Policy,
        host: HostPool | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._policy = policy
        self._host = HostPool(config.kinds, config.block_size) if host is None else host
        adaptive = config.chunking is Chunking.ADAPTIVE
        chooses = config.preemption == "auto" and self._host.num_blocks > 0
        steps = AdaptiveChunks(
            config.target_itl_s, least=config.min_chunk_size, most=config.chunk_size
        )
        self._chunks = steps if adaptive else None
        self._costs = PreemptionCosts(steps) if chooses else None
        self._steps = steps if adaptive or chooses else None
        self._speculator = speculator
        self._running: dict[Lane, dict[Sequence, None]] = {
            lane: {} for lane in sorted(Lane, key=lambda lane: lane.rank)
        }
        self.preemptions: Counter[Preemption] = Counter()
        self.preempted_tokens: Counter[Preemption] = Counter()
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        self._policy.add(sequence)

    def add_next(self, sequence: Sequence) -> None:
        """The same for one whose request is being served: it goes before all others of its lane."""
        self._policy.put_back(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence run that has one token more than was computed for ``parent``.

        It waits, before all others of its lane, if the sequence budget has no room, or the parent
        does not run or has not computed as much.
        """
        running = self._running[parent.lane]
        full = self.num_running() >= self._config.max_sequences
        if full or parent.num_computed_tokens != child.num_tokens - 1:
            self._policy.put_back(child)
            return
        self._blocks.fork(parent, child)
        child.status = SequenceStatus.RUNNING
        running[child] = None

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended or was aborted: forget it and free its blocks."""
        if sequence.status is SequenceStatus.WAITING:
            self._policy.remove(sequence)
            self._host.drop(sequence)
        else:
            self._stop_running(sequence)
            self._policy.end(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Plan | None:
        """Plan the next step; None if there is nothing to do."""
        step = Step()
        self._displace_less_urgent(step)
        step.budget = self._token_budget()
        all_kept = self._continue_running(step)
        # Thrash guard, part 1: what was just taken from one is not given to another.
        if all_kept:
            self._admit_waiting(step)
            if self._speculator is not None and step.budget:
                self._add_drafts(step, self._speculator)
        if not step.spans:
            self._complete_first_group(step)
        return step.plan() if step.spans else None

    def observe(self, plan: Plan, seconds: float) -> None:
        """The step of ``plan`` took so long: chunks and preemptions are measured by it."""
        if self._steps is not None:
            self._steps.observe(plan, seconds)

    def observe_swaps(self, plan: Plan, seconds: float) -> None:
        """The swaps of ``plan`` held its step up for so long."""
        if self._costs is not None and (plan.swaps_out or plan.swaps_in):
            self._costs.observe_swaps(len(plan.swaps_out), len(plan.swaps_in), seconds)

    def _token_budget(self) -> int:
        """Query tokens of the next step; one of each running sequence is always in it."""
        most = self._config.max_batch_tokens
        if self._chunks is None:
            return most
        running = self.num_running()
        return min(most, running + self._chunks.limit(running))

    def running(self) -> Iterator[Sequence]:
        """The running sequences, in the order of service."""
        for sequences in self._running.values():
            yield from sequences

    def num_running(self, lane: Lane | None = None) -> int:
        """How many run, in one lane or in all."""
        if lane is not None:
            return len(self._running[lane])
        return sum(map(len, self._running.values()))

    def _displace_less_urgent(self, step: Step) -> None:
        """Preempt for the first in line if it is more urgent than what stands in its way.

        Before anything is planned, and all or nothing: nobody is preempted for a sequence that
        could not be admitted even then.
        """
        head = self._policy.peek()
        victims = [] if head is None else self._running_behind(head)
        if head is None or not victims:
            return
        has_slot = self.num_running() < self._config.max_sequences
        # If it counts blocks that do not become available, because others share them, the head
        # waits for another step, behind nobody less urgent.
        chosen = self._blocks.victims_needed(head, self._spare(head), victims)
        if chosen is None:
            return
        if not has_slot:
            chosen = max(chosen, 1)
        for victim in victims[:chosen]:
            self._preempt(victim, PreemptionCause.URGENT, step)

    def _running_behind(self, head: Sequence) -> list[Sequence]:
        """What ``head`` may displace: last in lane first, then the least work lost."""
        behind = [
            sequence
            for lane, sequences in self._running.items()
            if lane.rank > head.rank
            for sequence in reversed(sequences)
            if self._policy.may_displace(head, sequence)
        ]
        return sorted(behind, key=lambda s: (-s.rank, s.num_computed_tokens))

    def _continue_running(self, step: Step) -> bool:
        """Plan what runs; False if some sequence had to be preempted."""
        queue = [sequence for sequences in self._running.values() for sequence in sequences]
        all_kept, chunk_size = True, self._config.chunk_size
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
            if not self._blocks.try_reserve(sequence, stop, step.copies):
                all_kept = False
                if not self._make_room(sequence, stop, queue[len(queue) - num_behind :], step):
                    continue
            spans.append(Span(sequence, start, num_tokens, stop == sequence.num_tokens))
            budget -= num_tokens
        step.budget = budget
        return all_kept

    def _make_room(self, sequence: Sequence, stop: int, behind: list[Sequence], step: Step) -> bool:
        """Preempt until ``sequence`` can have its blocks; False if it had to give up its own."""
        # Last in lane first, then the least work lost; of equals the one admitted last.
        candidates = (s for s in reversed(behind) if s.status is SequenceStatus.RUNNING)
        victims = iter(sorted(candidates, key=lambda s: (-s.rank, s.num_computed_tokens)))
        while not self._blocks.try_reserve(sequence, stop, step.copies):
            victim = next(victims, None)
            if victim is None:
                self._preempt(sequence, PreemptionCause.YIELDED, step)
                return False
            self._preempt(victim, PreemptionCause.EARLIER, step)
        return True

    def _preempt(self, sequence: Sequence, cause: PreemptionCause, step: Step) -> None:
        """Take the blocks back. Tokens stay; their keys and values are kept elsewhere, or not."""
        saved = self._try_swap_out(sequence, step.swaps_out)
        mode = PreemptionMode.SWAP if saved else PreemptionMode.RECOMPUTE
        self.preemptions[sequence.lane, cause, mode] += 1
        self.preempted_tokens[sequence.lane, cause, mode] += sequence.num_computed_tokens
        self._stop_running(sequence)
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._policy.put_back(sequence)

    def _try_swap_out(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        if not self._host.num_blocks or self._config.preemption == "recompute":
            return False
        if self._costs is not None and not self._costs.prefers_swap(
            sequence.num_computed_tokens, self._host.num_needed(sequence)
        ):
            return False
        return self._host.try_save(sequence, copies)

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence.lane][sequence]
        self._blocks.release(sequence)

    def _admit_waiting(self, step: Step) -> None:
        """Admit in the policy's order until a budget is used up or the first in line does not fit.

        A sequence is admitted when all tokens it has now fit beside the watermark, and gets blocks
        for them at once; how far it will grow is not known, and not reserved for. Without chunks it
        must also fit into what is left of this step.
        """
        whole = self._config.chunking is Chunking.OFF
        while step.budget and self.num_running() < self._config.max_sequences:
            sequence = self._policy.peek()
            if sequence is None or (whole and sequence.num_tokens > step.budget):
                return
            if not self._admit(sequence, self._spare(sequence), step):
                return

    def _admit(self, sequence: Sequence, spare: int, step: Step) -> bool:
        """Let a waiting sequence run, and plan what it computes; False if it does not fit."""
        common = self._longest_common(sequence) if sequence.siblings else None
        if common is None or not self._blocks.try_join(sequence, *common, spare, step.copies):
            if not self._blocks.try_admit(sequence, spare):
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
        num_missing = sequence.num_tokens - sequence.num_computed_tokens
        self._policy.admit(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence.lane][sequence] = None
        step.add(sequence, min(sequence.chunk(num_missing), self._config.chunk_size, step.budget))
        return True

    def _longest_common(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """The running sibling that has computed most of what ``sequence`` begins with.

        The last token is left out, since its logits are needed. None if the prefix cache has as
        much, as it does of one that was preempted a moment ago, or the host.
        """
        most = max(self._blocks.num_cached_tokens(sequence), sequence.num_swapped_tokens)
        best = None
        for sibling in sequence.siblings:
            end = min(sibling.num_computed_tokens, sequence.num_tokens - 1)
            if end > most:  # else it cannot have more in common, or does not run
                length = _num_equal(sequence.token_ids[:end], sibling.token_ids[:end])
                best, most = (sibling, length) if length > most else (best, most)
        return None if best is None else (best, most)

    def _complete_first_group(self, step: Step) -> None:
        """All that run are beams that wait for siblings: let the first search go on.

        Nothing was planned, so everything that runs may lose its blocks; and then the rest of the
        first one's group fits, as the engine takes no search that does not fit alone.
        """
        first = next(self.running(), None)
        if first is None:
            return
        for sequence in list(self.running()):
            if sequence not in first.siblings:
                self._preempt(sequence, PreemptionCause.YIELDED, step)
        whole = self._config.chunking is Chunking.OFF
        for sequence in first.siblings:
            fits = sequence.num_tokens <= step.budget if whole else step.budget > 0
            if fits and sequence.status is SequenceStatus.WAITING:
                self._admit(sequence, 0, step)

    def _add_drafts(self, step: Step, speculator: Speculator) -> None:
        """Let the step verify drafts with what is left of budget and blocks.

        Nobody is preempted for a draft and nobody waits for one; what they take of blocks goes
        back after the step, unless they are accepted.
        """
        for choice in speculator.choose(step.spans, step.budget):
            span, count = step.spans[choice.index], choice.count
            sequence, stop = span.sequence, span.start + 1 + count
            if stop <= sequence.num_writable_tokens or self._blocks.try_reserve(
                sequence, stop, step.copies
            ):
                step.draft(choice)

    def _spare(self, sequence: Sequence) -> int:
        """Blocks that must be left over when ``sequence`` is admitted."""
        num_running = self.num_running()
        if num_running == 0:
            return 0  # there is nobody who could need them, and the pool holds any one sequence
        # Thrash guard, part 2: who was preempted comes back only when all that run can grow by a
        # block, i.e. for about block_size steps, before KV is short again.
        growth = num_running if sequence.num_preemptions else 0
        return self._config.watermark_blocks + growth

    def check_integrity(self, live: set[Sequence]) -> None:
        """Check queues and blocks against the sequences the engine knows.

        Raises:
            IntegrityError: a sequence is lost or in two places, or the blocks do not add up.
        """
        running, waiting = list(self.running()), list(self._policy)
        if len(running) + len(waiting) != len(live) or {*running, *waiting} != live:
            raise IntegrityError(f"{running=} and {waiting=} are not the live sequences {live}")
        for sequence in live:
            is_running = sequence in self._running[sequence.lane]
            status = SequenceStatus.RUNNING if is_running else SequenceStatus.WAITING
            if sequence.status is not status:
                raise IntegrityError(f"{sequence} should be {status.value}")
            if not is_running and (sequence.block_table or sequence.num_computed_tokens):
                raise IntegrityError(f"{sequence} waits and holds blocks")
            if is_running and (sequence.host_blocks or sequence.num_swapped_tokens):
                raise IntegrityError(f"{sequence} runs and is kept on the host")
            if sequence.num_tokens > self._blocks.capacity_tokens:
                raise IntegrityError(f"{sequence} can never fit into {self._blocks.num_blocks}")
        if len(running) > self._config.max_sequences:
            raise IntegrityError(f"{len(running)} sequences run")
        self._blocks.check_integrity(running)
        self._host.check_integrity(waiting)


def _num_equal(one: list[int], other: list[int]) -> int:
    """Length of the common begin of two lists of equal length."""
    if one == other:  # as a rule, and much faster
        return len(one)
    return list(map(eq, one, other)).index(False)

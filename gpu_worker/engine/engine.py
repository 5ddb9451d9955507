"""The engine: requests in, plans out, sampled tokens in, published tokens out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from typing import NamedTuple

from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.states import Lane, Reason

from .config import EngineConfig
from .kv.kv_manager import KVManager
from .output.output_state import OutputState
from .output.step_output import StepOutput
from .output.text_stream import TextStream
from .plan import Plan, Span
from .requests.engine_request import EngineRequest, Finish, Update
from .requests.request_manager import RequestManager
from .requests.request_validator import RequestValidator
from .scheduling.policies.policy import Policy
from .scheduling.policies.registry import make_policy
from .scheduling.scheduler import Scheduler
from .sequence import SequenceStatus
from .speculation.controller import Speculator
from .stats import EngineStats, Load, PoolUse

__all__ = ["Engine"]

_NEVER = repeat(False)


class _Prepared(NamedTuple):
    """A plan of ``prepare_ahead``.

    Attributes:
        plan: the plan.
        outputs: of its sequences.
    """

    plan: Plan
    outputs: list[OutputState]


class Engine:
    """Continuous batching without a device: it plans steps, and a model runner computes them.

    ::

        engine.add(request)
        while plan := engine.schedule():
            output = runner.run(plan)
            for update in engine.collect(plan, output): publish(update)

    Between ``schedule`` and ``collect`` (or ``fail``) requests may be added and aborted. Progress
    is recorded only in ``collect``: a step that failed has changed nothing but block tables. Not
    thread-safe: one thread calls everything.

    Where host and device can work side by side, ``schedule_ahead`` plans a step before the output
    of the one before is collected, so that this is done while the step computes::

        ahead = engine.schedule_ahead(output)
        start(ahead)
        updates = engine.collect(plan, output)
        engine.prepare_ahead()  # for the next one, so that this is done meanwhile, too

    Args:
        config: sizes and budgets.
        detokenizer: makes the incremental detokeniser of one output, given the prompt's ids.
        policy: order of admission; by default the one that ``config`` names.
    """

    def __init__(
        self,
        config: EngineConfig,
        detokenizer: Callable[[tuple[int, ...]], TextStream],
        policy: Policy | None = None,
    ) -> None:
        self._config = config
        self._policy = policy if policy is not None else make_policy(config)
        self._kv = KVManager(
            config.kv_cache_groups,
            config.block_size,
            prefix_cache=config.prefix_cache,
            max_span=config.max_span,
        )
        self._validator = RequestValidator(config, self._kv)
        self._speculator: Speculator | None = None
        if config.speculation is not None:
            self._speculator = Speculator(config.speculation, config.max_model_len, config.max_span)
        self._scheduler = Scheduler(config, self._kv, self._policy, self._speculator)
        self._requests = RequestManager(config, self._validator, self._scheduler, detokenizer)
        self._in_flight: list[Plan] = []  # oldest first; two after schedule_ahead
        self._prepared: _Prepared | None = None
        self._apart_s = 0.0  # swaps and draft model of the last step
        self._model_s: float | None = None  # of the last step
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_output_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, i.e. ``schedule`` would return a plan."""
        return len(self._requests) > 0

    def add(self, request: EngineRequest) -> Update | None:
        """Take a request, or the rest of one that another worker began.

        Returns:
            None if it was taken. If the request ends at once, its only update, without tokens. It
            can never fit (``prompt_too_long``, ``out_of_memory``), or its options name tokens that
            the model lacks (``invalid``). Or its published tokens already satisfy a stop rule, and
            only the end was missing.

        Raises:
            InvalidRequest: the id is in the engine already, or the prompt is empty.
        """
        self._prepared = None
        return self._requests.add(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free all it holds; no update comes after.

        Returns:
            False if there is no such request: it was never here or has ended.
        """
        self._prepared = None
        return self._requests.abort(request_id)

    def schedule(self) -> Plan | None:
        """Plan the next step; None if there is nothing to do.

        Raises:
            IntegrityError: the plan before was neither collected nor failed.
        """
        if self._in_flight:
            raise IntegrityError("schedule() before the last plan was collected or failed")
        self._prepared = None
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append(plan)
        return plan

    def prepare_ahead(self) -> Plan | None:
        """Plan the step after the one in flight while that is computed, in case all go on.

        That is possible only where nothing can be admitted, and no sequence has drafts, siblings or
        a constraint, or is at its last token. The plan is not to be run: ``schedule_ahead`` gives
        it with its tokens, unless requests were added or aborted meanwhile.

        Returns:
            The plan without token ids; None: it cannot be made yet.

        Raises:
            IntegrityError: not exactly one plan is in flight.
        """
        if len(self._in_flight) != 1:
            raise IntegrityError(f"prepare_ahead() with {len(self._in_flight)} plans in flight")
        (before,) = self._in_flight
        self._prepared = None
        if self._speculator is not None and not self._speculator.stays_plain(len(before.spans)):
            return None
        outputs = self._requests.may_go_on(before.spans)
        plan = None if outputs is None else self._scheduler.schedule_ahead(before)
        if plan is None or outputs is None:
            return None
        self._prepared = _Prepared(plan, outputs)
        return plan

    def schedule_ahead(self, output: StepOutput) -> Plan | None:
        """Plan the step after the one in flight, before that one's output is collected.

        That is possible where ``prepare_ahead`` has a plan or makes one, and no token just sampled
        ends an output. Then only a stop string can still end one, and the step computes one row of
        that sequence in vain.

        Args:
            output: of the plan in flight.

        Returns:
            The plan, which :attr:`Plan.token_ids` marks; its spans are those that ``prepare_ahead``
            gave. None: collect first, then schedule.

        Raises:
            IntegrityError: not exactly one plan is in flight.
        """
        if self._prepared is None:
            self.prepare_ahead()
        prepared, self._prepared = self._prepared, None
        if prepared is None or not output.moved or output.failures or output.deferred:
            return None
        token_ids = tuple(chain.from_iterable(output.token_ids))
        outputs = prepared.outputs
        if any(of.ends_with(token) for of, token in zip(outputs, token_ids, strict=True)):
            return None
        plan = Plan(prepared.plan.spans, token_ids=token_ids)
        self._in_flight.append(plan)
        return plan

    def drop(self, plan: Plan) -> None:
        """Forget a plan of ``schedule_ahead``: it was not computed, or in vain.

        Raises:
            IntegrityError: it is not the only plan in flight.
        """
        if self._in_flight != [plan]:
            raise IntegrityError("drop() of a plan that is not the only one in flight")
        self._in_flight.clear()
        self._prepared = None

    def collect(self, plan: Plan, output: StepOutput) -> list[Update]:
        """Record what a step computed and sampled.

        Args:
            plan: the oldest that is neither collected nor failed.
            output: what the model gave for it.

        Returns:
            One update for each sequence that got a token or failed, in the plan's order. (For
            requests that are published whole, one for each choice when they end.)

        Raises:
            IntegrityError: plan and output do not belong together.
        """
        self._close_in_flight(plan, moved=output.moved)
        self._apart_s = output.swap_s or 0.0
        self._model_s = None
        if output.timing is not None:
            self._apart_s += output.timing.draft_seconds
            self._model_s = output.timing.seconds
        if output.swap_s is not None:
            self._scheduler.observe_swaps(plan, output.swap_s)
        spans, failures = plan.spans, output.failures
        if len(output.token_ids) != len(spans):
            raise IntegrityError(f"{len(output.token_ids)} outputs for {len(spans)} spans")
        updates: list[Update] = []
        num_computed = num_sampled = 0
        finished, outputs = SequenceStatus.FINISHED, self._requests.outputs
        block_size, pool_tokens = self._config.block_size, self._validator.pool_tokens
        logprobs, of_prompt = output.logprobs, output.prompt_logprobs
        ends = map(failures.get, range(len(spans))) if failures else repeat(None)
        late = map(output.deferred.__contains__, range(len(spans))) if output.deferred else _NEVER
        for span, token_ids, failure, is_late in zip(
            spans, output.token_ids, ends, late, strict=False
        ):
            sequence, num_tokens = span.sequence, span.num_tokens
            if sequence.status is finished:
                continue  # aborted while the step ran
            if failure is not None:
                updates.append(self._requests.end(sequence, failure))
                continue
            if is_late:
                num_tokens -= 1  # the last token is computed again, for its logits
                self._kv.trim(sequence)  # and drafts, if it had some, are drawn anew
            elif span.num_drafts:
                num_computed += 1 + span.num_drafts
                num_before = sequence.num_tokens
                updates += self._collect_drafted(span, token_ids, output)
                num_sampled += sequence.num_tokens - num_before  # none behind its end
                continue
            elif len(token_ids) != span.samples:
                raise IntegrityError(f"{sequence}: {span.samples=}, but got {token_ids}")
            stop = sequence.num_computed_tokens = span.start + num_tokens
            if num_tokens > 1 or stop % block_size == 0:  # else it has filled no block
                self._kv.mark_computed(sequence)
            num_computed += num_tokens
            if of_prompt and sequence in of_prompt:
                self._requests.add_prompt_logprobs(sequence, of_prompt[sequence])
            if not token_ids:
                continue
            num_sampled += 1
            if sequence.siblings:
                updates += self._requests.collect(sequence, token_ids, output)
                continue
            update = outputs[sequence.id].append(token_ids)
            if logprobs and sequence in logprobs:
                update.logprobs = logprobs[sequence]
            if (
                update.finish is not None
                or sequence.num_prompt_logprobs is not None
                or len(sequence.token_ids) > pool_tokens
            ):
                self._requests.complete_update(sequence, update)
            updates.append(update)
        if self._speculator is not None:
            self._speculator.observe_step(
                spans, num_sampled, output.timing, failed=output.draft_failed
            )
        self._num_steps += 1
        self._num_computed_tokens += num_computed
        self._num_output_tokens += num_sampled
        return updates

    def observe(self, plan: Plan, seconds: float) -> None:
        """Tell how long the turn took in which ``plan`` was computed; it was collected last.

        With steps planned ahead, collecting the step before is a part of the turn.

        Adaptive chunks need it, the choice between swap and recompute, and that to draft.
        """
        self._scheduler.observe(plan, seconds - self._apart_s)
        if self._speculator is not None and self._model_s is not None:
            self._speculator.observe_host(max(0.0, seconds - self._model_s))

    def _collect_drafted(
        self, span: Span, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """Take the accepted drafts of a span and the token after them.

        They count as computed once they are the sequence's. Behind them its blocks hold keys and
        values of refused drafts, which the next step overwrites.
        """
        sequence, num_before = span.sequence, span.sequence.num_tokens
        num_drafted = output.drafted.get(sequence, len(span.drafts))
        if not 1 <= len(token_ids) <= num_drafted + 1:
            raise IntegrityError(f"{sequence}: {num_drafted} drafts, but got {token_ids}")
        assert self._speculator is not None
        sequence.num_computed_tokens = span.start + 1
        self._kv.mark_computed(sequence)
        updates = self._requests.collect(sequence, token_ids, output)
        num_accepted, num_taken = len(token_ids) - 1, sequence.num_tokens - num_before
        self._speculator.observe(span, num_drafted, num_accepted, min(num_accepted, num_taken))
        if sequence.status is not SequenceStatus.FINISHED:
            sequence.num_computed_tokens += num_taken - 1
            self._kv.mark_computed(sequence)
            self._kv.trim(sequence)
        return updates

    def fail(self, plan: Plan, reason: Reason, message: str) -> list[Update]:
        """The step raised: end its sequences. Nothing it may have computed or copied is used.

        Returns:
            One update for each of their requests, without tokens. All others go on.

        Raises:
            IntegrityError: ``plan`` is not the oldest in flight.
        """
        self._close_in_flight(plan, moved=False)
        finish = Finish(reason, message)
        return [
            self._requests.end(span.sequence, finish)
            for span in plan.spans
            if span.sequence.status is not SequenceStatus.FINISHED  # as its siblings end with it
        ]

    def load(self) -> Load:
        """What decides how much more work to take."""
        waiting = {lane: count for lane in Lane if (count := self._policy.num_waiting(lane))}
        return Load(waiting, self._kv.available_tokens(self._config.max_model_len))

    def stats(self) -> EngineStats:
        """Counts of now and totals since the start, in O(1)."""
        scheduler, kv, host = self._scheduler, self._kv, self._kv.host
        return EngineStats(
            running={lane: scheduler.num_running(lane) for lane in Lane},
            waiting={lane: self._policy.num_waiting(lane) for lane in Lane},
            num_blocks=kv.num_blocks,
            used_blocks=kv.num_used,
            cached_blocks=kv.num_cached,
            free_blocks=kv.num_available - kv.num_cached,
            pools=tuple(
                PoolUse(pool.window, pool.num_blocks, pool.num_used, pool.num_cached)
                for pool in kv.pools
            ),
            available_tokens=kv.available_tokens(self._config.max_model_len),
            evictions=kv.num_evictions,
            steps=self._num_steps,
            computed_tokens=self._num_computed_tokens,
            output_tokens=self._num_output_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=dict(scheduler.preemptions),
            preempted_tokens=dict(scheduler.preempted_tokens),
            num_host_blocks=host.num_blocks,
            used_host_blocks=host.num_used,
            swapped_out_blocks=host.num_out,
            swapped_in_blocks=host.num_in,
            swapped_out_bytes=host.bytes_out,
            swapped_in_bytes=host.bytes_in,
            swap_refusals=host.num_refusals,
            speculation=None if self._speculator is None else self._speculator.stats(),
        )

    def check_integrity(self) -> None:
        """Recount everything, in O(pool + live sequences): when idle, and after each test step.

        Raises:
            IntegrityError: an invariant does not hold; the message says which.
        """
        self._scheduler.check_integrity(self._requests.sequences())

    def _close_in_flight(self, plan: Plan, *, moved: bool) -> None:
        if not self._in_flight or plan is not self._in_flight[0]:
            raise IntegrityError("this plan is not the oldest in flight")
        del self._in_flight[0]
        self._prepared = None
        if plan.swaps_out:
            self._kv.host.confirm_saves() if moved else self._kv.host.discard_saves()

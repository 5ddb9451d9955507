"""The worker's loop: pull -> schedule -> run -> publish.

One thread owns the engine and the model; no other touches them. It also reads its orders itself,
since another thread would take the interpreter lock from it in the middle of a step. The results of
a step, or of several short ones, leave in one message to the edge process, which publishes them
while the next step runs. A slow Redis never holds the device, and a long step never holds the
lease.

Where the engine can plan the next step ahead, the last one is collected and published while the
next one computes. What requests get is the same either way.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.shared.protocol.states import Reason

from ..engine.engine import Engine
from ..engine.output.step_output import StepOutput
from ..engine.plan import Plan
from ..engine.requests.engine_request import EngineRequest, Update
from ..engine.scheduling.step_features import StepFeatures
from ..messages import Broken, StepRecord, StepReport, packed_updates
from .held_updates import HeldUpdates
from .isolation import Runner, run_isolated
from .step_log import StepLog
from .usage_meter import UsageMeter

__all__ = ["Orders", "Worker"]

_log = logging.getLogger("penstock.worker")

_HEARTBEAT_S = 0.5
"""How often an idle worker reports, unless it is told to do so more often."""

_STATS_S = 0.1
"""How often all figures are reported while steps run: to collect them takes a while."""

_QUIET_S = 2.0
"""A worker that had nothing to do for so long may do something that holds up the next request."""

_MOST_CONSECUTIVE_FAILURES = 8
"""After this many consecutive failures, blame the worker, not the requests."""


_MOST_FAILURES_AHEAD = 3
"""After this many consecutive failures of steps planned ahead, none is planned ahead any more."""


class Orders(Protocol):
    """Where orders come from. It reads them and calls the worker's methods."""

    def poll(self) -> None:
        """Read what has come, without waiting."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something has come; False after the timeout."""


class _Computed(NamedTuple):
    """A step that was computed and is not collected yet.

    Attributes:
        plan: of the step.
        output: what it gave.
        run_s: seconds of the model. They include what was done beside it: collecting the step
            before, and preparing the next.
        turn_s: seconds from before the plan to the output, with the same.
    """

    plan: Plan
    output: StepOutput
    run_s: float
    turn_s: float


class Worker:
    """One engine, one model, and the loop that drives them.

    Args:
        engine: pure scheduling and stop rules.
        runner: computes plans on the device.
        report: takes a message after steps, and regularly while the worker is idle; may wait.
        orders: read before each step, and when there is nothing to do.
        clock: monotonic seconds.
        step_log: gets the work of each step and the seconds of its turn; None: no log.
        heartbeat_s: how often to report while idle, in seconds.
        when_quiet: called once, after two seconds without anything to do; must return at once.
        stream_interval_s: how long tokens may wait for those of later steps, in seconds.
        overlap: plan ahead where possible; useful if the device computes without this thread.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        report: Callable[[StepReport | Broken], None],
        orders: Orders,
        clock: Callable[[], float] = time.monotonic,
        step_log: StepLog | None = None,
        heartbeat_s: float = _HEARTBEAT_S,
        when_quiet: Callable[[], None] | None = None,
        stream_interval_s: float = 0.0,
        overlap: bool = False,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._report = report
        self._orders = orders
        self._clock = clock
        self._step_log = step_log
        self._heartbeat_s = min(heartbeat_s, _HEARTBEAT_S)
        self._inbox: deque[EngineRequest | str] = deque()
        self._stopping = False
        self._overlap = overlap
        self._last: _Computed | None = None
        self._is_in_engine = False  # while a step runs: what raises then is no fault of the step
        self._failures_ahead = 0  # in a row
        self._prepares = True
        self._reported_stats_at = clock()
        self._held = HeldUpdates(stream_interval_s)
        self._records: list[StepRecord] = []  # of steps since the last report
        self._has_pulled = False  # something, since the last report
        self._failure: BaseException | None = None
        self._consecutive_failures: set[str] = set()  # requests that failed since one was computed
        self._quiet_turns = 0  # in which nothing was ordered, since the last step
        self._when_quiet = when_quiet
        self._meter = UsageMeter()

    # -- orders, as `Orders` reads them ---------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Have a request served."""
        self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        """Stop a request at the next step; nothing more is reported about it."""
        self._inbox.append(request_id)

    def stop(self) -> None:
        """End the loop after the step that runs now."""
        self._stopping = True

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if it was not :meth:`stop`. Such a worker must be replaced."""
        return self._failure

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`, or until the loop breaks, which is reported."""
        try:
            while not self._stopping:
                self._step()
            self._collect()
            self._publish((), everything=True)
        except BaseException as error:
            # A bug in the engine itself, or a device that is lost. Nothing can be trusted any more,
            # so the process must end; the supervisor hands its requests to others.
            _log.exception("the engine loop broke")
            self._failure = error
            self._report(Broken(repr(error)))

    def _step(self) -> None:
        turn_began = self._clock()
        self._pull()
        if self._stopping:
            return  # the order came just now: the step before was the last
        began = self._clock()
        plan = self._schedule()
        if plan is None:
            self._idle()
            return
        run_began = self._clock()
        output = self._run(plan)
        if output is None:
            return
        ended = self._clock()
        self._last = _Computed(plan, output, ended - run_began, ended - began)
        if self._step_log is not None:
            self._step_log.write(StepFeatures.of(plan), self._clock() - turn_began)

    def _pull(self) -> None:
        """Give the engine what was ordered since the last step."""
        self._orders.poll()
        if self._inbox:
            self._collect()  # first, so that its report does not count what comes now as waiting
        while self._inbox:
            order = self._inbox.popleft()
            if isinstance(order, str):
                self._engine.abort(order)
                self._meter.forget(order)
                self._held.forget(order)
                self._has_pulled = True
                continue
            refusal = self._engine.add(order)
            if refusal is not None:
                self._publish([refusal])
            self._has_pulled = True  # its first step is reported at once

    def _schedule(self) -> Plan | None:
        """Plan the next step: ahead, or else on what the last one gave."""
        if self._overlap and self._last is not None:
            plan = self._engine.schedule_ahead(self._last.output)
            if plan is not None:
                return plan
        self._collect()
        return self._engine.schedule()

    def _run(self, plan: Plan) -> StepOutput | None:
        """Compute a plan; requests that fail do so alone. None: it was dropped."""
        output = self._run_ahead(plan) if plan.token_ids else run_isolated(self._runner, plan)
        if output is not None:
            self._check_systemic_failure(plan, output)
            self._quiet_turns = 0
        return output

    def _run_ahead(self, plan: Plan) -> StepOutput | None:
        """Compute a plan made ahead, and collect the step before it meanwhile.

        If that raises, the plan is dropped: the next turn plans it anew, and finds the culprit.
        """
        try:
            output = self._runner.run(plan, self._work_beside)
        except Exception as error:
            if self._is_in_engine:
                raise  # a bug of the engine, and no fault of the step
            _log.warning("a step planned ahead fails, and is planned again", exc_info=error)
        else:
            self._collect()
            self._failures_ahead = 0
            return output
        self._collect()
        self._runner.recover()
        self._engine.drop(plan)
        self._failures_ahead += 1
        if self._failures_ahead >= _MOST_FAILURES_AHEAD:
            _log.error("no further step is planned ahead")
            self._overlap = False
        return None

    def _work_beside(self) -> None:
        """Collect the last step and prepare the next one, while a step computes.

        The next step is planned and prepared as if this one ended no output. So when the step has
        ended, only its tokens are missing.
        """
        self._collect()
        if not self._prepares:
            return
        self._is_in_engine = True
        plan = self._engine.prepare_ahead()
        self._is_in_engine = False
        if plan is None:
            return
        try:
            self._runner.prepare(plan)
        except Exception as error:
            _log.warning("the next step could not be prepared", exc_info=error)
            self._prepares = False  # it gains little, and may fail again

    def _collect(self) -> None:
        """Record and publish what the last step gave, if that is not done."""
        if self._last is None:
            return
        self._is_in_engine = True
        plan, output, run_s, turn_s = self._last
        self._meter.add(plan, output, run_s)
        self._records.append(
            StepRecord(
                run_s,
                plan.num_tokens,
                len(plan.spans),
                num_failures=len(output.failures),
                num_deferred=len(output.deferred),
                draft_failed=output.draft_failed,
            )
        )
        self._publish(self._engine.collect(plan, output))
        self._engine.observe(plan, turn_s)
        self._last, self._is_in_engine = None, False

    def _check_systemic_failure(self, plan: Plan, output: StepOutput) -> None:
        """Raise if the worker fails, not the requests: then they must go on elsewhere.

        Each is blamed as by a crash. So a request that fails wherever it is computed soon becomes a
        suspect. Suspects are served one by one, and end with their own failure.
        """
        if not output.moved:
            self._runner.recover()
        if len(output.failures) < len(plan.spans):
            self._consecutive_failures.clear()
            return
        self._consecutive_failures.update(
            plan.spans[index].sequence.id
            for index, finish in output.failures.items()
            if finish.reason is Reason.ENGINE_ERROR
        )
        if len(self._consecutive_failures) >= _MOST_CONSECUTIVE_FAILURES:
            (*_, last) = output.failures.values()
            raise RuntimeError(
                f"{len(self._consecutive_failures)} requests in a row failed, "
                f"the last with: {last.message}"
            )

    def _publish(self, updates: Sequence[Update], *, everything: bool = False) -> None:
        """Report what requests got, and how the engine is; nothing if all of it may wait."""
        engine, now = self._engine, self._clock()
        idle = not (engine.has_work or self._inbox)
        is_due = idle or everything or self._has_pulled or self._held.is_due(now)
        updates = self._held.release(updates, now, everything=idle or everything)
        if not (updates or is_due):
            return
        stats = None
        if idle or now - self._reported_stats_at > _STATS_S:
            stats, self._reported_stats_at = engine.stats(), now
        used = self._meter.report(updates, now)
        records, self._records, self._has_pulled = tuple(self._records), [], False
        self._report(StepReport(packed_updates(updates), engine.load(), records, stats, used))

    def _idle(self) -> None:
        """Show that the loop turns, and wait for orders."""
        self._publish(())
        if self._orders.wait(self._heartbeat_s):
            return
        self._quiet_turns += 1
        # A recount of the whole pool takes milliseconds, and the next request would wait for it. So
        # it waits for quiet moments, not for any gap between two requests.
        if self._quiet_turns == 1:
            self._engine.check_integrity()
        if self._when_quiet is not None and self._quiet_turns * self._heartbeat_s >= _QUIET_S:
            self._when_quiet()
            self._when_quiet = None

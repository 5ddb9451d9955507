"""The worker's loop: pull -> schedule -> run -> publish.

Its thread owns the engine and the model; nobody else touches them. It reads its orders itself, as
any other thread would take the interpreter lock from it in the middle of a step. What a step gave
leaves in one message to the edge process, which publishes step n while step n + 1 runs: a slow
Redis never holds the device, and a long step never holds the lease.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.shared.protocol import Reason

from ..engine.engine import Engine
from ..engine.plan import Plan, StepOutput
from ..engine.requests import EngineRequest, Update
from ..engine.scheduling.step_features import Work
from ..messages import Broken, Step, StepRecord, packed_updates
from .isolation import Runner, run_isolated
from .step_log import StepLog

__all__ = ["Orders", "Worker"]

_log = logging.getLogger("penstock.worker")

_QUIET_S = 0.5
"""Without work for this long, the worker checks that its books balance."""

_STATS_S = 0.1
"""How often all figures are told while steps run: to put them together takes a while."""

_FUTILE = 8
"""So many requests that fail in a row, and none that is computed in between, are not to blame."""


class Orders(Protocol):
    """Where orders come from: what it reads, it gives to the worker's methods."""

    def poll(self) -> None:
        """Read what has come, without waiting."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something has come; False after the timeout."""


class Worker:
    """One engine, one model, and the loop that drives them.

    Args:
        engine: pure scheduling and stop rules.
        runner: computes plans on the device.
        tell: takes what there is to say after each step; may wait.
        orders: read before each step, and when there is nothing to do.
        clock: monotonic seconds.
        step_log: is told the work of each step and the seconds of its turn; None: nobody is.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        tell: Callable[[Step | Broken], None],
        orders: Orders,
        clock: Callable[[], float] = time.monotonic,
        step_log: StepLog | None = None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._tell = tell
        self._orders = orders
        self._clock = clock
        self._step_log = step_log
        self._inbox: deque[EngineRequest | str] = deque()
        self._stopping = False
        self._told_stats_at = clock()
        self._failure: BaseException | None = None
        self._futile: set[str] = set()  # requests that failed since one was computed

    # -- orders, as `Orders` reads them ---------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Have a request served."""
        self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        """Stop a request at the next step; nothing more is told about it."""
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
        """Serve until :meth:`stop`, or until the loop breaks, which is told."""
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:
            # A bug in the engine itself, or a device that is lost. Nothing can be trusted any more,
            # so the process must end; the supervisor hands its requests to others.
            _log.exception("the engine loop broke")
            self._failure = error
            self._tell(Broken(repr(error)))

    def _step(self) -> None:
        turn_began = self._clock()
        self._pull()
        if self._stopping:
            return  # told just now: the step before was the last
        began = self._clock()
        plan = self._engine.schedule()
        if plan is None:
            self._idle()
            return
        output, record = self._run(plan)
        self._publish(plan, output, record)
        self._engine.observe(plan, self._clock() - began)
        if self._step_log is not None:
            self._step_log.write(Work.of(plan), self._clock() - turn_began)

    def _run(self, plan: Plan) -> tuple[StepOutput, StepRecord]:
        began = self._clock()
        output = run_isolated(self._runner, plan)
        seconds = self._clock() - began
        self._distrust(plan, output)
        return output, StepRecord(
            seconds,
            plan.num_tokens,
            len(plan.spans),
            num_failures=len(output.failures),
            num_deferred=len(output.deferred),
            draft_failed=output.draft_failed,
        )

    def _distrust(self, plan: Plan, output: StepOutput) -> None:
        """Raise if it is not the requests that fail: then they must not end here, but go on.

        Each is blamed as by a crash. So those that do fail wherever they are computed are suspects
        soon, which are served one by one, and end with what they fail with.
        """
        if not output.moved:
            self._runner.recover()
        if len(output.failures) < len(plan.spans):
            self._futile.clear()
            return
        self._futile.update(
            plan.spans[index].sequence.id
            for index, finish in output.failures.items()
            if finish.reason is Reason.ENGINE_ERROR
        )
        if len(self._futile) >= _FUTILE:
            (*_, last) = output.failures.values()
            raise RuntimeError(
                f"{len(self._futile)} requests in a row failed, the last with: {last.message}"
            )

    def _pull(self) -> None:
        self._orders.poll()
        while self._inbox:
            order = self._inbox.popleft()
            if isinstance(order, str):
                self._engine.abort(order)
                continue
            refusal = self._engine.add(order)
            if refusal is not None:
                self._say([refusal])

    def _publish(self, plan: Plan, output: StepOutput, record: StepRecord) -> None:
        self._say(self._engine.collect(plan, output), record)

    def _idle(self) -> None:
        self._say(())
        # A recount of the whole pool takes milliseconds, which the next request would wait for:
        # it is for quiet moments, not for every gap between two requests.
        if not self._orders.wait(_QUIET_S):
            self._engine.check_integrity()
            self._orders.wait(None)

    def _say(self, updates: Sequence[Update], record: StepRecord | None = None) -> None:
        engine, now = self._engine, self._clock()
        busy = engine.has_work or bool(self._inbox)
        stats = None
        if not busy or now - self._told_stats_at > _STATS_S:
            stats, self._told_stats_at = engine.stats(), now
        self._tell(Step(packed_updates(updates), engine.load(), busy, record, stats))

"""The worker's loop: pull -> schedule -> run -> publish, on a thread of its own.

The thread owns the engine and the model; nobody else touches them. Orders reach it through an
inbox, results leave through the outbox, and neither waits: a slow Redis never holds the device,
and a long step never holds the lease. While step n + 1 runs, the edge publishes step n.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from penstock.shared.protocol import Reason

from .engine.engine import Engine
from .engine.plan import Plan, StepOutput
from .engine.requests import EngineRequest, Finish
from .engine.stats import EngineStats
from .metrics import WorkerMetrics
from .outbox import Outbox

__all__ = ["Runner", "Worker"]

_log = logging.getLogger("penstock.worker")

_QUIET_S = 0.5
"""Without work for this long, the worker checks that its books balance."""


class Runner(Protocol):
    """The model side, as the loop sees it."""

    def run(self, plan: Plan) -> StepOutput:
        """Compute a plan.

        May raise; then no span of it counts as computed, but its copies and swaps are done. If
        these fail, it says so in its output (``moved``) and does not raise.
        """


class Worker:
    """One engine, one model, and the loop that drives them.

    Args:
        engine: pure scheduling and stop rules.
        runner: computes plans on the device.
        outbox: takes what each step produced.
        metrics: observed once per step.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        outbox: Outbox,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._inbox: deque[EngineRequest | str] = deque()
        self._news = threading.Event()
        self._stopping = False
        self._step_began: float | None = None
        self._stats = engine.stats()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # -- for other threads ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        """Have a request served."""
        self._inbox.append(request)
        self._news.set()

    def abort(self, request_id: str) -> None:
        """Stop a request at the next step; nothing more is posted about it."""
        self._inbox.append(request_id)
        self._news.set()

    def stop(self) -> None:
        """End the loop after the step that runs now."""
        self._stopping = True
        self._news.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the loop to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """The engine's figures as of the last step."""
        return self._stats

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if it was not :meth:`stop`. Such a worker must be replaced."""
        return self._failure

    def stuck_for(self) -> float:
        """Seconds the present step has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    # -- the loop -------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:
            # Only a bug in the engine itself comes here. Its state can not be trusted any more,
            # so the process must end; the supervisor hands its requests to others.
            _log.exception("the engine loop broke")
            self._failure = error

    def _step(self) -> None:
        self._pull()
        began = self._clock()
        plan = self._engine.schedule()
        if plan is None:
            self._idle()
            return
        output = self._run(plan)
        self._publish(plan, output)
        self._engine.observe(plan, self._clock() - began)

    def _run(self, plan: Plan) -> StepOutput:
        self._step_began = began = self._clock()
        output = run_isolated(self._runner, plan)
        self._step_began = None
        self._metrics.step_seconds.observe(self._clock() - began)
        self._metrics.step_tokens.observe(plan.num_tokens)
        self._metrics.step_sequences.observe(len(plan.spans))
        self._metrics.step_failures.inc(len(output.failures))
        if output.deferred:
            self._metrics.deferrals.inc(len(output.deferred))
        return output

    def _pull(self) -> None:
        while self._inbox:
            order = self._inbox.popleft()
            if isinstance(order, str):
                self._engine.abort(order)
                continue
            refusal = self._engine.add(order)
            if refusal is not None:
                self._outbox.post([refusal])

    def _publish(self, plan: Plan, output: StepOutput) -> None:
        self._outbox.post(self._engine.collect(plan, output))
        self._show_stats()

    def _idle(self) -> None:
        self._show_stats()
        # A recount of the whole pool takes milliseconds, which the next request would wait for:
        # it is for quiet moments, not for every gap between two requests.
        if not self._news.wait(_QUIET_S):
            self._engine.check_integrity()
            self._news.wait()
        self._news.clear()

    def _show_stats(self) -> None:
        self._stats = self._engine.stats()
        self._metrics.show_engine(self._stats)


def run_isolated(runner: Runner, plan: Plan) -> StepOutput:
    """Run a plan; if it raises, run its halves, until only the culprits have failed.

    One poisoned request, or one too large for the memory that is left, must not take its batch
    with it. Computing a span again is harmless: the same keys and values go to the same slots, and
    random numbers are keyed by request and index. Block copies and swaps are not repeated, since
    they were done before the forward pass that failed (a runner whose copies fail does not raise),
    and by now their sources may hold something else.

    Returns:
        Tokens of the spans that could be computed, and the failures of the others.
    """
    try:
        return runner.run(plan)
    except Exception as error:
        if len(plan.spans) == 1:
            _log.error("a request fails in the model: %s", error, exc_info=error)
            return StepOutput(((),), {0: Finish(_reason(error), _describe(error))})
        middle = len(plan.spans) // 2
        first = run_isolated(runner, Plan(plan.spans[:middle]))
        rest = run_isolated(runner, Plan(plan.spans[middle:]))
        failures = {middle + index: finish for index, finish in rest.failures.items()}
        return StepOutput(
            first.token_ids + rest.token_ids,
            {**first.failures, **failures},
            {**first.logprobs, **rest.logprobs},
            {**first.candidates, **rest.candidates},
            prompt_logprobs={**first.prompt_logprobs, **rest.prompt_logprobs},
            deferred=first.deferred.union(middle + index for index in rest.deferred),
            drafted={**first.drafted, **rest.drafted},
        )


def _reason(error: Exception) -> Reason:
    # torch.OutOfMemoryError on a GPU, MemoryError or "can't allocate memory" on a CPU. By name:
    # this module must not import torch.
    text = f"{type(error).__name__} {error}".lower()
    signs = ("outofmemory", "out of memory", "allocate memory", "memoryerror")
    return Reason.OUT_OF_MEMORY if any(sign in text for sign in signs) else Reason.ENGINE_ERROR


def _describe(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"

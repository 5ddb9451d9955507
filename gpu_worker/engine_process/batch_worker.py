"""The loop of a worker whose model answers at once: pull -> schedule -> run -> publish.

It stands in the place of the :class:`.worker.Worker`'s, behind the same messages: edge, supervisor,
health and drain know no difference. One thread owns the model; a batch that hangs holds the loop,
whose silence the edge takes for the end of this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from penstock.shared.protocol import Reason

from ..batchers.batch_queue import Batch, BatchQueue, Item
from ..batchers.batcher_class import ServedBatcher
from ..batchers.halving import Result, failure_of, run_in_halves
from ..batchers.window import Window
from ..engine.requests import Finish, Update
from ..engine.stats import Load
from ..messages import Add, Broken, RunUsage, StepRecord, StepReport, packed_updates
from .worker import Orders

__all__ = ["ANY_NUMBER_OF_TOKENS", "BatchWorker"]

_log = logging.getLogger("penstock.worker")

ANY_NUMBER_OF_TOKENS = 1 << 40
"""What a step can take: not the cost of payloads decides what is claimed, but their number."""

_LOAD = Load({}, ANY_NUMBER_OF_TOKENS)


class BatchWorker:
    """One model that answers at once, and the loop that drives it.

    Args:
        model: what is served.
        queue: gathers items.
        window: learns what batches cost.
        report: takes a message after each batch, and regularly while there is none; may wait.
        orders: read before each batch, and when there is nothing to do.
        heartbeat_s: how often to report while no batch runs, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: ServedBatcher,
        queue: BatchQueue,
        window: Window,
        report: Callable[[StepReport | Broken], None],
        orders: Orders,
        *,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._queue = queue
        self._window = window
        self._report = report
        self._orders = orders
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._reported_at = clock()
        self._refusals: list[Update] = []
        self._stopping = False

    # -- orders ---------------------------------------------------------------------------------

    def begin(self, order: Add) -> None:
        """Have a request served."""
        payload = order.request.payload
        try:
            cost, key = self._model.cost(payload), self._model.key(payload)
            if not isinstance(cost, int) or cost < 0:
                raise TypeError(f"cost returned {cost!r}; allowed: an integer, 0 or more")
            hash(key)
        except Exception as error:
            self._refusals.append(_update(order.run, failure_of(error)))
            return
        self._queue.add(
            Item(
                run=order.run,
                payload=payload,
                lane=order.request.lane,
                cost=cost,
                key=key,
                arrival=order.arrival,
                came=self._clock(),
                deadline=order.deadline,
                alone=order.suspect,
            )
        )

    def abort(self, run: str) -> None:
        """Forget a request that waits; nothing more is reported about it."""
        self._queue.drop(run)

    def stop(self) -> None:
        """End the loop after the batch that runs now."""
        self._stopping = True

    def beat(self) -> None:
        """Show that the loop turns; between the passes of a long batch, and while there is none."""
        if self._clock() - self._reported_at >= self._heartbeat_s:
            self._tell(())

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`, or until the loop breaks, which is reported."""
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:
            # The batcher asks to be replaced, or this loop has a bug: others take its requests.
            _log.exception("the batch loop broke")
            self._report(Broken(repr(error)))

    def _step(self) -> None:
        self._pull()
        if self._stopping:
            return
        batch = self._queue.schedule(self._clock())
        if batch is None:
            self._idle()
            return
        began = self._clock()
        model, payloads = self._model, [item.payload for item in batch.items]
        results = run_in_halves(model.infer, payloads, model.charged)
        self._publish(batch, results, self._clock() - began)

    def _pull(self) -> None:
        """Take what was ordered since the last batch."""
        self._orders.poll()
        # Redis ends what is past its time; to compute it would be waste.
        self._queue.drop_expired(self._clock())
        if self._refusals:
            refusals, self._refusals = self._refusals, []
            self._tell(refusals)

    def _publish(self, batch: Batch, results: Sequence[Result | Finish], seconds: float) -> None:
        """Report the results of a batch, and share its time out among them."""
        failures = sum(isinstance(result, Finish) for result in results)
        if not failures:  # halves are no measure
            self._window.ran(batch.cost, seconds)
        updates = [
            _update(item.run, result, item.cost)
            for item, result in zip(batch.items, results, strict=True)
        ]
        cost = sum(update.prompt_tokens for update in updates)
        share_us = seconds * 1e6 / max(1, cost)
        used = (RunUsage(one.id, round(share_us * one.prompt_tokens), 0) for one in updates)
        self._tell(updates, StepRecord(seconds, cost, len(updates), failures, 0), tuple(used))

    def _idle(self) -> None:
        """Wait for orders or for the end of a window, and show now and then that the loop turns."""
        self.beat()
        now, due = self._clock(), self._queue.next_due()
        patience = self._heartbeat_s if due is None else min(self._heartbeat_s, due - now)
        if patience > 0:
            self._orders.wait(patience)

    def _tell(
        self,
        updates: Sequence[Update],
        record: StepRecord | None = None,
        used: tuple[RunUsage, ...] = (),
    ) -> None:
        self._report(StepReport(packed_updates(updates), _LOAD, record, None, used))
        self._reported_at = self._clock()


def _update(run: str, result: Result | Finish, cost: int = 0) -> Update:
    """What a request got: its result, or its failure."""
    if isinstance(result, Finish):
        return Update(run, 0, (), "", result, cost, 0)
    charged = cost if result.charged is None else result.charged
    return Update(run, 0, (0,), "", Finish(Reason.STOP), charged, 0, result=result.packed)

"""The loop of a worker whose model answers at once: pull -> schedule -> run -> publish.

It stands in the place of the :class:`.worker.Worker`'s, behind the same messages: edge, supervisor,
health and drain know no difference. One thread owns the model; a batch that hangs holds the loop,
whose silence the edge takes for the end of this process. Several batches of an asynchronous model
run beside the loop, which breaks if one of them hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.shared.protocol.states import Reason

from ..batchers.batch_queue import Batch, BatchQueue, Item
from ..batchers.batcher_class import ServedBatcher
from ..batchers.concurrent_batches import ConcurrentBatches
from ..batchers.halving import Result, failure_of, run_in_halves
from ..batchers.window import Window
from ..engine.requests.engine_request import Finish, Update
from ..engine.stats import BatcherStats, Load
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
        max_concurrent: batches that run at once; more than one needs a concurrent model.
        wake: ends a wait for orders; from any thread.
        hang_timeout_s: of several batches, one that runs for longer hangs; in seconds.
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
        max_concurrent: int = 1,
        wake: Callable[[], None] = lambda: None,
        hang_timeout_s: float = float("inf"),
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
        self._last: Batch | None = None
        self._beside: ConcurrentBatches | None = None
        if max_concurrent > 1:
            self._beside = ConcurrentBatches(
                self._infer, max_concurrent, wake, hang_timeout_s=hang_timeout_s, clock=clock
            )

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
        """End the loop after the batches that run now."""
        self._stopping = True

    def beat(self) -> None:
        """Show that the loop turns; between the passes of a long batch, and while there is none."""
        if self._clock() - self._reported_at >= self._heartbeat_s:
            self._tell(())

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`, or until the loop breaks, which is reported."""
        try:
            while not self._stopping or self._beside:
                self._step()
        except BaseException as error:
            # The batcher asks to be replaced, or this loop has a bug: others take its requests.
            _log.exception("the batch loop broke")
            self._report(Broken(repr(error)))

    def _step(self) -> None:
        self._pull()
        if self._beside is not None:
            self._publish_ended(self._beside)
        batch = self._next_batch()
        if batch is None:
            self._idle()
        elif self._beside is not None:
            self._beside.start(batch)
        else:
            began, self._last = self._clock(), batch
            self._publish(batch, self._infer(batch, self.beat), self._clock() - began)

    def _infer(self, batch: Batch, on_pass: Callable[[], None]) -> list[Result | Finish]:
        """Compute a batch. Each pass of a batch that fails may take as long as any batch."""

        def infer(payloads: list[Any]) -> object:
            try:
                return self._model.infer(payloads)
            finally:
                on_pass()

        payloads = [item.payload for item in batch.items]
        return run_in_halves(infer, payloads, self._model.charged)

    def _next_batch(self) -> Batch | None:
        """Take the next batch that is due, if it may begin now."""
        return self._queue.schedule(self._clock()) if self._may_begin() else None

    def _may_begin(self) -> bool:
        if self._stopping:
            return False
        return self._beside is None or self._beside.has_room(alone=self._queue.suspect_is_next)

    def _publish_ended(self, beside: ConcurrentBatches) -> None:
        for batch, results, seconds in beside.take_ended():
            if isinstance(results, BaseException):
                raise results
            self._publish(batch, results, seconds)
        beside.check_progress()

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
        """Wait for orders or for the end of a window or of a batch; show that the loop turns."""
        if self._stopping and not self._beside:
            return
        self.beat()
        self._last = None
        now, due = self._clock(), self._queue.next_due() if self._may_begin() else None
        patience = self._heartbeat_s if due is None else min(self._heartbeat_s, due - now)
        if patience > 0:
            self._orders.wait(patience)

    def _tell(
        self,
        updates: Sequence[Update],
        record: StepRecord | None = None,
        used: tuple[RunUsage, ...] = (),
    ) -> None:
        stats = self._stats()
        records = () if record is None else (record,)
        self._report(StepReport(packed_updates(updates), _LOAD, records, None, used, stats))
        self._reported_at = self._clock()

    def _stats(self) -> BatcherStats:
        """What is in hand. One batch at a time counts until a loop without work has been seen."""
        if self._beside is not None:
            items, batches = self._beside.num_items, len(self._beside)
        else:
            items, batches = (0, 0) if self._last is None else (len(self._last.items), 1)
        return BatcherStats(len(self._queue), items, batches, self._window.first_wait_s)


def _update(run: str, result: Result | Finish, cost: int = 0) -> Update:
    """What a request got: its result, or its failure."""
    if isinstance(result, Finish):
        return Update(run, 0, (), "", result, cost, 0)
    charged = cost if result.charged is None else result.charged
    finish = Finish(Reason.STOP, result=result.packed, generated_none=True)
    return Update(run, 0, (0,), "", finish, charged, 0)

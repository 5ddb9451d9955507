"""Serves an encoder: what has come is computed together, and meanwhile the next batch gathers.

A batch that raises is run in halves until each culprit is alone; the others get their answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import Lane, Reason
from penstock.shared.protocol.payload import pack_result

from ..engine.requests import Finish, Update
from ..engine.stats import Load
from ..messages import (
    Abort,
    Add,
    RunUsage,
    StepRecord,
    StepReport,
    Stop,
    bare_end,
    packed_updates,
)
from .model_interface import ItemServer

__all__ = ["BATCH_TOKENS", "EncoderLoop", "OrderChannel"]

_log = logging.getLogger("penstock.worker")

BATCH_TOKENS = 16_384
"""About so many tokens are computed before the next answers are sent."""

_MAX_ITEMS = 256


class OrderChannel(Protocol):
    """The socket to the edge process."""

    def read(self) -> Iterator[object]:
        """What has come, without waiting for more."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for something to read."""

    def send(self, message: Any) -> None:
        """Write a message."""

    def close(self) -> None:
        """Tell the edge that no message follows."""


class EncoderLoop:
    """Follows the edge's orders.

    Args:
        server: answers items.
        channel: to the edge.
        heartbeat_s: how often to report while idle.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        server: ItemServer,
        channel: OrderChannel,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._waiting: dict[Lane, dict[str, Add]] = {lane: {} for lane in Lane}
        self._stopping = False

    def run(self) -> None:
        """Serve until the order to stop; what waits then goes to another worker."""
        while not self._stopping:
            self._read_orders()
            batch = self._next_batch()
            if batch and not self._stopping:
                self._serve(batch)
            elif not self._stopping:
                self.beat()
                self._channel.wait(self._heartbeat_s)
        self._channel.close()

    def beat(self) -> None:
        """Tell the edge that the loop turns; also between the passes of a long batch."""
        self._channel.send(StepReport((), self._load()))

    def _read_orders(self) -> None:
        for order in self._channel.read():
            if isinstance(order, Add):
                self._waiting[order.request.lane][order.run] = order
            elif isinstance(order, Abort):
                for runs in self._waiting.values():
                    runs.pop(order.run, None)
            elif isinstance(order, Stop):
                self._stopping = True

    def _next_batch(self) -> list[Add]:
        """The oldest of the most urgent, up to the bounds; at least one if any waits."""
        batch: list[Add] = []
        tokens = 0
        for lane in sorted(Lane, key=lambda lane: lane.rank):
            for run, add in list(self._waiting[lane].items()):
                tokens += self._server.cost(add.request.payload)
                if batch and (tokens > BATCH_TOKENS or len(batch) == _MAX_ITEMS):
                    return batch
                batch.append(self._waiting[lane].pop(run))
        return batch

    def _serve(self, batch: list[Add]) -> None:
        began = self._clock()
        results = self._infer(batch)
        seconds = self._clock() - began
        updates = [_update(*pair) for pair in zip(batch, results, strict=True)]
        num_tokens = sum(update.prompt_tokens for update in updates)
        used = tuple(
            RunUsage(update.id, round(1e6 * seconds * update.prompt_tokens / num_tokens), 0)
            for update in updates
            if update.prompt_tokens
        )
        failures = sum(isinstance(result, Exception) for result in results)
        record = StepRecord(seconds, num_tokens, len(batch), failures, 0)
        self._channel.send(StepReport(packed_updates(updates), self._load(), record, used=used))

    def _infer(self, batch: list[Add]) -> list[dict[str, Any] | Exception]:
        try:
            return list(self._server.infer([add.request.payload for add in batch]))
        except Exception as error:
            if len(batch) == 1:
                _log.exception("a request failed")
                return [error]
        self.beat()
        half = len(batch) // 2
        return self._infer(batch[:half]) + self._infer(batch[half:])

    def _load(self) -> Load:
        waiting = {lane: len(runs) for lane, runs in self._waiting.items() if runs}
        return Load(waiting, BATCH_TOKENS)


def _update(add: Add, result: dict[str, Any] | Exception) -> Update:
    """The one update of a request: its answer, or why there is none."""
    if isinstance(result, dict):
        try:
            return Update(
                id=add.run,
                start=0,
                token_ids=(0,),
                text="",
                finish=Finish(Reason.STOP),
                prompt_tokens=result["tokens"],
                cached_tokens=0,
                result=pack_result(result),
            )
        except ValueError as error:
            result = error
    invalid = isinstance(result, InvalidRequest)
    return bare_end(add.run, Reason.INVALID if invalid else Reason.ENGINE_ERROR, str(result))

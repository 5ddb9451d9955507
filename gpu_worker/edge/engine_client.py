"""The edge's side of its engine process: gives it orders, reads what it reports."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from penstock.shared.errors import PenstockError

from ..engine.stats import Load
from ..engine_start import StartedEngine
from ..launch import EXIT_BROKEN, Launch, describe_exit
from ..messages import (
    Abort,
    Add,
    Broken,
    Frames,
    Prepared,
    Ready,
    Refused,
    StepReport,
    Stop,
    frame,
    unpacked_updates,
)
from ..monitoring.heartbeat import Heartbeat, HeartbeatWatch
from ..monitoring.metrics import WorkerMetrics
from .guarded_task import Guard
from .outbox import Outbox
from .owned_requests import OwnedRequests

__all__ = ["EngineClient", "EngineEnded", "EngineRefused"]

_log = logging.getLogger("penstock.edge")

_REAP_S = 5.0


class EngineRefused(PenstockError):
    """The model or a setting is refused; a restart would meet the same."""


class EngineEnded(PenstockError):
    """The engine process ended unasked; ``code`` as :class:`subprocess.Popen` gives it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the engine process ended unasked ({describe_exit(code)})")
        self.code = code


class EngineClient(asyncio.Protocol):
    """One engine process.

    Attributes:
        load: how much more it can take, as of its last report.
        step_tokens: query tokens of one of its steps at most; 0 before it has started.

    Args:
        owned: the table of owned requests; is told how far their prompts have come.
        outbox: takes what its steps give.
        metrics: shows its figures.
        wake: called when it has reported something.
        watch: is shown a heartbeat for each message. The engine sends one after a step, or
            a few short ones, and several in ``worker.hang_timeout_s`` while it is idle.
    """

    def __init__(
        self,
        owned: OwnedRequests,
        outbox: Outbox,
        metrics: WorkerMetrics,
        wake: Callable[[], None],
        watch: HeartbeatWatch,
    ) -> None:
        self.load = Load({}, 0)
        self.step_tokens = 0
        self._owned = owned
        self._outbox = outbox
        self._metrics = metrics
        self._wake = wake
        self._watch = watch
        self._guard = Guard("engine_pipe", metrics)
        self._frames = Frames()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._heartbeat: Heartbeat | None = None
        self._hang_timeout_s = 0.0
        self._gone = asyncio.Event()
        self._failure: str | None = None

    async def start(self, launch: Launch, engine: StartedEngine) -> Ready:
        """Wait until the process has loaded its model; returns what it says then.

        Raises:
            EngineRefused: model or settings are refused.
            EngineEnded: it died.
        """
        loop = asyncio.get_running_loop()
        self._hang_timeout_s = launch.settings.worker.hang_timeout_s
        self._ready = loop.create_future()
        self._process, ours = engine
        await loop.create_unix_connection(lambda: self, sock=ours)
        return await self._ready

    # -- orders ---------------------------------------------------------------------------------

    def add(self, order: Add) -> None:
        """Have a request served."""
        tokens = order.request.prompt_estimate + len(order.output_ids)
        tokens += sum(map(len, order.choice_ids))
        self._owned.ordered(order.run, tokens)
        self._send(order)

    def abort(self, run: str) -> None:
        """Stop a request at the next step. What the step gives that runs now still comes."""
        self._owned.not_prepared(run)
        self._send(Abort(run))

    async def stop(self, timeout_s: float) -> bool:
        """Have it end after the step that runs now; whether it has, with all it said heard."""
        self._stop_watching()
        self._send(Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, message: NamedTuple) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    # -- how it is ------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why it must be replaced; None while it need not be."""
        return self._failure

    async def exit_code(self) -> int:
        """The code with which it ended, or :data:`EXIT_BROKEN` if it has not by itself."""
        assert self._process is not None
        if not self._gone.is_set():
            self.kill()
            return EXIT_BROKEN
        try:
            return await asyncio.to_thread(self._process.wait, _REAP_S)
        except subprocess.TimeoutExpired:
            self.kill()  # and its memory is free when this process is gone, too
            return EXIT_BROKEN

    # -- what it says ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio wants it."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """As asyncio wants it. An error ends the connection: no token may be left out."""
        for message in self._frames.feed(data):
            if self._heartbeat is not None:
                self._heartbeat.beat()
            self._receive(message)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio wants it."""
        del exc  # whatever broke it, the process is of no use any more
        self._stop_watching()
        self._gone.set()
        self._failure = self._failure or "the engine process is gone"
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineEnded(EXIT_BROKEN))
        self._wake()

    def _receive(self, message: object) -> None:
        if isinstance(message, StepReport):
            self._receive_step(message)
        elif isinstance(message, Prepared):
            if message.end is None:
                self._owned.prepared(message.run)
            else:
                self._owned.not_prepared(message.run)
                self._outbox.post([message.end])
        elif isinstance(message, Ready):
            assert self._ready is not None
            self.step_tokens = message.step_tokens
            self._heartbeat = self._watch.add("the engine's step loop", self._hang_timeout_s)
            self._ready.set_result(message)
        elif isinstance(message, Refused):
            assert self._ready is not None
            self._ready.set_exception(EngineRefused(message.message))
        elif isinstance(message, Broken):
            self._failure = message.error

    def _receive_step(self, step: StepReport) -> None:
        self.load = step.load
        self._owned.step_ended()
        self._owned.used_more(step.used)
        if step.updates:
            self._outbox.post(unpacked_updates(step.updates))
        try:
            for record in step.records:
                self._metrics.observe_step(record)
            if step.stats is not None:
                self._metrics.show_engine(step.stats)
            if step.batcher is not None:
                self._metrics.show_batcher(step.batcher)
        except Exception as error:
            self._guard.isolated("the figures of a step", error)

    def _stop_watching(self) -> None:
        if self._heartbeat is not None:
            self._watch.remove(self._heartbeat)

"""The edge's hold on its engine process: starts it, gives it orders, hears what it says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound

from ..engine.stats import Load
from ..launch import EXIT_BROKEN, Launch, describe_exit
from ..messages import (
    Abort,
    Add,
    Broken,
    Frames,
    Prepared,
    Ready,
    Refused,
    Step,
    Stop,
    Taken,
    frame,
    unpacked_updates,
)
from ..metrics import WorkerMetrics
from .outbox import Outbox

__all__ = ["EngineEnded", "EngineLink", "EngineRefused"]

ENGINE_PROGRAM = "penstock.gpu_worker.engine_process.main"

_log = logging.getLogger("penstock.edge")

_REAP_S = 5.0


class EngineRefused(PenstockError):
    """The model or a setting is refused; a restart would meet the same."""


class EngineEnded(PenstockError):
    """The engine process ended unasked; ``code`` as :class:`subprocess.Popen` gives it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the engine process ended unasked ({describe_exit(code)})")
        self.code = code


class EngineLink(asyncio.Protocol):
    """One engine process.

    Attributes:
        load: how much more it can take, as of its last step.
        step_tokens: query tokens of one of its steps at most; 0 before it has started.
        arriving_tokens: about so many of prompts whose first step has not ended.

    Args:
        outbox: takes what its steps give.
        metrics: shows its figures.
        wake: called when it has said something.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        outbox: Outbox,
        metrics: WorkerMetrics,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load = Load({}, 0)
        self.step_tokens = 0
        self.arriving_tokens = 0
        self._beginning_tokens = 0  # of those, whose first step may run now
        self._outbox = outbox
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._frames = Frames()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[str] | None = None
        self._gone = asyncio.Event()
        self._failure: str | None = None
        self._unread: set[str] = set()  # orders that the engine's loop has not seen
        self._unprepared: dict[str, int] = {}  # tokens of those, and of what is being prepared
        self._busy = False
        self._heard_at = 0.0

    async def start(self, launch: Launch) -> str:
        """Start the process and wait until its model is loaded; returns a line about that.

        Raises:
            EngineRefused: model or settings are refused.
            EngineEnded: it died.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn_bound(
                [
                    sys.executable,
                    "-m",
                    "penstock.gpu_worker.engine_process.main",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, as will be seen
            self._process.stdin.write(launch.to_line())
            self._process.stdin.close()
        await loop.create_unix_connection(lambda: self, sock=ours)
        return await self._ready

    # -- orders ---------------------------------------------------------------------------------

    def add(self, order: Add) -> None:
        """Have a request served."""
        if not self._busy and not self._unread:
            self._heard_at = self._clock()
        self._unread.add(order.run)
        tokens = order.request.prompt_estimate + len(order.output_ids)
        tokens += sum(map(len, order.choice_ids))
        self._unprepared[order.run] = tokens
        self.arriving_tokens += tokens
        self._send(order)

    def abort(self, run: str) -> None:
        """Stop a request at the next step. What the step gives that runs now still comes."""
        self._forget(run)
        self._send(Abort(run))

    async def stop(self, timeout_s: float) -> bool:
        """Have it end after the step that runs now; whether it has, with all it said heard."""
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

    def stuck_for(self) -> float:
        """Seconds of silence while its loop has something to do; 0 if there is nothing.

        To be prepared may take as long as it takes: that is not the loop's work.
        """
        return self._clock() - self._heard_at if self._busy or self._unread else 0.0

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
        """As asyncio wants it."""
        for message in self._frames.feed(data):
            self._hear(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio wants it."""
        del exc  # whatever broke it, the process is of no use any more
        self._gone.set()
        self._failure = self._failure or "the engine process is gone"
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineEnded(EXIT_BROKEN))
        self._wake()

    def _hear(self, message: object) -> None:
        self._heard_at = self._clock()
        if isinstance(message, Step):
            self._hear_step(message)
        elif isinstance(message, Taken):
            self._unread.discard(message.run)
        elif isinstance(message, Prepared):
            if message.end is None:
                self._unread.discard(message.run)
                self._beginning_tokens += self._unprepared.pop(message.run, 0)
                self._busy = True  # a step follows
            else:
                self._forget(message.run)
                self._outbox.post([message.end])
        elif isinstance(message, Ready):
            assert self._ready is not None
            self.step_tokens = message.step_tokens
            self._ready.set_result(message.summary)
        elif isinstance(message, Refused):
            assert self._ready is not None
            self._ready.set_exception(EngineRefused(message.message))
        elif isinstance(message, Broken):
            self._failure = message.error
        self._wake()

    def _forget(self, run: str) -> None:
        self._unread.discard(run)
        self.arriving_tokens -= self._unprepared.pop(run, 0)

    def _hear_step(self, step: Step) -> None:
        self.load, self._busy = step.load, step.busy
        self.arriving_tokens -= self._beginning_tokens
        self._beginning_tokens = 0
        if step.updates:
            self._outbox.post(unpacked_updates(step.updates))
        if step.record is not None:
            self._metrics.observe_step(step.record)
        if step.stats is not None:
            self._metrics.show_engine(step.stats)

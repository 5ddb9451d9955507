"""The engine process: loads the model, prepares requests, and runs steps until it is told to stop.

The edge process starts it with one line of JSON on standard input (see :class:`Launch`) and the
number of an inherited socket as its argument. It knows nothing of Redis. It ignores signals, which
the edge handles, and ends on the edge's order or with the edge.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.local.cores import bind_to_cores
from penstock.shared.local.gc_tuning import calm_collector, without_collector
from penstock.shared.protocol.states import ModelKind
from penstock.shared.settings import Settings
from penstock.shared.synthetic import SYNTHETIC
from penstock.shared.vocabulary import pack_vocabulary

from ..batchers.batch_queue import BatchQueue
from ..batchers.batcher_class import ServedBatcher, load_batcher
from ..batchers.window import Window
from ..engine.engine import Engine
from ..launch import EXIT_REFUSED, Launch
from ..messages import Abort, Add, Frames, Ready, Refused, Stop, frame
from ..model.encoders.encoder_recipe import checkpoint_kind
from ..model.loading.checkpoint_folder import find_checkpoint
from ..monitoring.logs import configure_logging
from .batch_worker import ANY_NUMBER_OF_TOKENS, BatchWorker
from .input_processor import InputProcessor
from .model_interface import ServingModel
from .step_log import StepLog, step_log
from .worker import Worker

__all__ = ["main"]

_log = logging.getLogger("penstock.engine")

_READ_BYTES = 1 << 18

_STACK_BYTES = 16 << 20
"""Of each thread: several times what a constraint may take when it is tried in a sandbox."""

_HEARTBEATS = 4
"""At least this many within the time after which the edge takes a silent engine for hung."""


def main() -> int:
    """Serve one edge process; returns the exit code."""
    channel = EdgeChannel(socket.socket(fileno=int(sys.argv[1])))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(_STACK_BYTES)
    launch = Launch.from_line(sys.stdin.buffer.readline())
    worker = launch.settings.worker
    configure_logging(launch.worker_id, level=worker.log_level, form=worker.log_format)
    try:
        steps = step_log(worker.step_log)
        model = _build(launch.settings)
        if isinstance(model, ServedBatcher):
            _check_batcher(model, launch.settings)
    except PenstockError as error:
        channel.send(Refused(str(error)))
        return EXIT_REFUSED
    channel.send(_ready(model))
    with calm_collector():
        if isinstance(model, ServedBatcher):
            _serve_batches(model, launch.settings, channel)
        else:
            _serve(model, launch.settings, channel, steps)
    # A drain waits for the end of this process, and its end frees a model's memory fastest.
    logging.shutdown()
    os._exit(0)


def _build(settings: Settings) -> ServingModel | ServedBatcher:
    """Load the model. Its packages are imported here, since they take seconds themselves."""
    if settings.engine.cores is not None:
        bind_to_cores("engine.cores", settings.engine.cores)
    if settings.batcher.target is not None:
        return load_batcher(settings.batcher.target)
    if settings.model.path == SYNTHETIC:
        from .synthetic_model import build_synthetic

        return build_synthetic(settings)
    kind = checkpoint_kind(find_checkpoint(settings.model.path))
    if kind is not ModelKind.GENERATE:
        with without_collector():
            from ..model.encoders.building import build_encoder
        return build_encoder(settings, kind)
    with without_collector():
        from ..model.build import build_model
    return build_model(settings)


def _check_batcher(model: ServedBatcher, settings: Settings) -> None:
    if settings.worker.step_log is not None:
        raise ConfigurationError("worker.step_log: allowed: off, beside a batcher")
    concurrent = settings.batcher.max_concurrent_batches
    if concurrent > 1 and not model.concurrent:
        raise ConfigurationError(
            f"batcher.max_concurrent_batches: got {concurrent}; allowed: 1, unless infer is "
            "async def"
        )


def _ready(model: ServingModel | ServedBatcher) -> Ready:
    if isinstance(model, ServedBatcher):
        return Ready(
            model.summary, ANY_NUMBER_OF_TOKENS, model.fingerprint, model.context,
            pack_vocabulary(()), model.kind,
        )  # fmt: skip
    return Ready(
        model.summary,
        model.config.max_batch_tokens,
        model.fingerprint,
        model.config.max_model_len,
        pack_vocabulary(model.vocabulary),
    )


class EdgeChannel:
    """The socket to the edge process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = Frames()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def send(self, message: NamedTuple) -> None:
        """Write a message. Only the loop's thread does, which keeps them in order.

        Waits while the edge does not read, so that a stopped edge is not flooded.
        """
        try:
            self._channel.sendall(frame(message))
        except OSError:
            os._exit(0)  # the edge is gone

    def read(self) -> Iterator[object]:
        """What has come, without waiting for more."""
        while True:
            try:
                data = self._channel.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # it left something unread
                data = b""
            if not data:
                os._exit(0)  # the edge is gone
            yield from self._frames.feed(data)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for something to read or :meth:`wake`; False after the timeout."""
        ready, _, _ = select.select([self._channel, self._woken], [], [], timeout_s)
        if self._woken in ready:
            self._woken.recv(_READ_BYTES)
        return bool(ready)

    def wake(self) -> None:
        """End a wait; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full of wakes already
            self._wake.send(b".")

    def close(self) -> None:
        """Tell the edge that no message follows, before this process's memory is freed."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)


class _Orders:
    """Reads the edge's orders for the loop; see :class:`.worker.Orders`."""

    def __init__(self, channel: EdgeChannel) -> None:
        self._channel = channel

    def attach(
        self,
        begin: Callable[[Add], None],
        abort: Callable[[str], None],
        stop: Callable[[], None],
        deliver: Callable[[], None],
    ) -> None:
        """Say who carries the orders out, and who hands on what was prepared since."""
        self._begin, self._abort, self._stop, self._deliver = begin, abort, stop, deliver

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read, or something was prepared."""
        return self._channel.wait(timeout_s)

    def poll(self) -> None:
        """Read what has come, and hand on what was prepared since."""
        for order in self._channel.read():
            if isinstance(order, Add):
                self._begin(order)
            elif isinstance(order, Abort):
                self._abort(order.run)
            elif isinstance(order, Stop):
                self._stop()
        self._deliver()


def _serve(
    model: ServingModel, settings: Settings, channel: EdgeChannel, steps: StepLog | None
) -> None:
    """Follow orders until the order to stop."""
    engine, orders = Engine(model.config, model.new_text_stream), _Orders(channel)
    worker = Worker(
        engine,
        model.runner,
        channel.send,
        orders,
        step_log=steps,
        heartbeat_s=settings.worker.hang_timeout_s / _HEARTBEATS,
        when_quiet=model.load_rest,
        stream_interval_s=settings.worker.stream_interval_ms / 1000,
        overlap=settings.engine.overlap and model.overlaps,
    )
    inputs = InputProcessor(
        model.encode,
        model.compile,
        model.parser,
        worker.add,
        channel.send,
        channel.wake,
        prepare_compiler=model.prepare_compiler,
        constrain=model.constrain,
        decode=model.decode,
        compile_timeout_s=settings.engine.constraint_timeout_s,
    )

    def abort(run: str) -> None:
        if not inputs.cancel(run):
            worker.abort(run)

    orders.attach(inputs.begin, abort, worker.stop, inputs.deliver)
    worker.run()
    channel.close()
    inputs.close()
    if steps is not None:
        steps.close()


def _serve_batches(model: ServedBatcher, settings: Settings, channel: EdgeChannel) -> None:
    """The same for a model that answers at once."""
    batcher, orders = settings.batcher, _Orders(channel)
    window = Window(batcher.max_wait_ms / 1000, adaptive=batcher.window == "adaptive")
    worker = BatchWorker(
        model,
        BatchQueue(batcher.max_batch, batcher.max_batch_cost or model.max_cost, window),
        window,
        channel.send,
        orders,
        heartbeat_s=min(0.5, settings.worker.hang_timeout_s / _HEARTBEATS),
        max_concurrent=batcher.max_concurrent_batches,
        wake=channel.wake,
        hang_timeout_s=settings.worker.hang_timeout_s,
    )
    orders.attach(worker.begin, worker.abort, worker.stop, lambda: None)
    model.on_pass(worker.beat)
    worker.run()
    channel.close()
    model.close()


if __name__ == "__main__":
    sys.exit(main())

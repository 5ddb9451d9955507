"""What the edge process and the engine process tell each other, and how it travels.

As two threads they would fight for the interpreter lock. A step of the model is thousands of small
calls that release it, and each may get it back late. So the engine process only runs steps and
reports them, one or several in a write; the edge does the rest on another core.

A message is a pickle behind its length, on a socket pair that only these two processes hold. An
update of plain tokens, nearly always all there is, travels as a tuple: that costs a tenth.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import ModelKind, Reason

from .engine.requests.engine_request import Finish, Update
from .engine.stats import BatcherStats, EngineStats, Load
from .monitoring.logs import printable

__all__ = [
    "Abort",
    "Add",
    "Broken",
    "Frames",
    "Prepared",
    "Ready",
    "Refused",
    "RunUsage",
    "StepRecord",
    "StepReport",
    "Stop",
    "bare_end",
    "frame",
    "packed_updates",
    "unpacked_updates",
]

_LENGTH = struct.Struct("<I")

PackedUpdate = Update | tuple[str, int, tuple[int, ...], str, int, int, tuple[int, ...]]


# -- from the edge to the engine ----------------------------------------------------------------


class Add(NamedTuple):
    """Serve a request.

    Attributes:
        run: its name in the engine, see :func:`.owned_requests.run_name`.
        request: as it was submitted.
        output_ids: its published tokens, if it has one choice.
        choice_ids: its published tokens by choice, if it has several.
        arrival: when it was accepted, in seconds of the machine's monotonic clock.
        deadline: when it expires, by the same clock.
        suspect: it may have crashed a worker.
    """

    run: str
    request: Request
    output_ids: tuple[int, ...]
    choice_ids: tuple[tuple[int, ...], ...]
    arrival: float
    deadline: float
    suspect: bool = False


class Abort(NamedTuple):
    """Stop serving a run; no further report about it is needed."""

    run: str


class Stop(NamedTuple):
    """End after the step that runs now."""


# -- from the engine to the edge ----------------------------------------------------------------


class Ready(NamedTuple):
    """The model is loaded.

    Attributes:
        summary: a line for the log.
        step_tokens: query tokens of a step at most; what is claimed beyond a step only waits.
        fingerprint: of the model, see :class:`.model_interface.ServingModel`.
        context: tokens of its longest sequence.
        vocabulary: its tokens, see :func:`penstock.shared.vocabulary.pack_vocabulary`.
        kind: what it does with a request.
    """

    summary: str
    step_tokens: int
    fingerprint: str
    context: int
    vocabulary: bytes
    kind: ModelKind = ModelKind.GENERATE


class Refused(NamedTuple):
    """The model or a setting is refused; a restart would meet the same."""

    message: str


class Prepared(NamedTuple):
    """A run has reached the engine, or has ended before it did."""

    run: str
    end: Update | None = None


class StepRecord(NamedTuple):
    """What metrics say of a step.

    Attributes:
        seconds: of the model.
        num_tokens: computed.
        num_sequences: in the batch.
        num_failures: sequences that failed in it.
        num_deferred: tokens put off.
        draft_failed: its draft model raised.
    """

    seconds: float
    num_tokens: int
    num_sequences: int
    num_failures: int
    num_deferred: int
    draft_failed: bool = False


class RunUsage(NamedTuple):
    """What a run has used of this worker so far.

    Attributes:
        run: its name in the engine.
        device_us: its share of the steps' time, in microseconds.
        drafted: tokens drafted for it, accepted or not.
    """

    run: str
    device_us: int
    drafted: int


class StepReport(NamedTuple):
    """What the engine's loop reports after steps, and regularly while it has nothing to do.

    Attributes:
        updates: what the steps added, see :func:`packed_updates`.
        load: what decides how much more to claim.
        records: of the steps since the last report.
        stats: now and then, and whenever no step follows without a new order.
        used: of runs that end with the updates, and about once a second of all.
        batcher: of a model that answers at once.
    """

    updates: Sequence[PackedUpdate]
    load: Load
    records: tuple[StepRecord, ...] = ()
    stats: EngineStats | None = None
    used: tuple[RunUsage, ...] = ()
    batcher: BatcherStats | None = None


class Broken(NamedTuple):
    """A bug ended the engine's loop: the process must be replaced."""

    error: str


# -- how they travel ----------------------------------------------------------------------------


def packed_updates(updates: Iterable[Update]) -> list[PackedUpdate]:
    """Updates in the form in which they travel, in their order."""
    return [
        update
        if update.finish is not None
        or update.logprobs
        or update.parts
        or update.prompt_logprobs
        or update.choice
        or update.deltas
        else (
            update.id,
            update.start,
            update.token_ids,
            update.text,
            update.prompt_tokens,
            update.cached_tokens,
            update.text_lengths,
        )
        for update in updates
    ]


def unpacked_updates(packed: Iterable[PackedUpdate]) -> list[Update]:
    """The inverse of :func:`packed_updates`."""
    return [
        item
        if isinstance(item, Update)
        else Update(
            item[0],
            item[1],
            item[2],
            item[3],
            None,
            item[4],
            item[5],
            (),
            0,
            (),
            (),
            item[6],  # by position: keywords would take twice as long
        )
        for item in packed
    ]


def bare_end(run: str, reason: Reason, message: str) -> Update:
    """The end of a request that never reached the engine's loop.

    Its message may quote what stands in the request, whatever that is.
    """
    return Update(
        id=run,
        start=0,
        token_ids=(),
        text="",
        finish=Finish(reason, printable(message)),
        prompt_tokens=0,
        cached_tokens=0,
    )


def frame(message: NamedTuple) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Puts messages together from the pieces in which a socket gives them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """Take what arrived; gives each message that is complete with it."""
        buffer = self._buffer
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer, begin)
                end = begin + _LENGTH.size + size
                if len(buffer) < end:
                    break
                message = pickle.loads(memoryview(buffer)[begin + _LENGTH.size : end])
                begin = end
                yield message
        finally:
            del buffer[:begin]

"""What the demo does to itself: it kills a worker, and a reader leaves and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...client import Producer
from ..local.worker_child import WorkerFacts
from .summary import FaultFigures, Row, Takeover
from .view import PlainView

__all__ = ["Absence", "check_streams", "disturb"]

_POLL_S = 0.002

_SEEN = 8
"""Tokens of every stream before the kill, so that one has seen them run."""

_MISSED = 16
"""Tokens that a reader misses before it comes back, unless its stream ends before."""


@dataclass(slots=True)
class Absence:
    """A reader that leaves its stream and comes back later.

    Attributes:
        wanted: it is to leave after the chunk that comes next.
        begun: it has left.
        over: it may come back.
    """

    wanted: bool = False
    begun: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Let the reader come back; it may leave again."""
        self.wanted = self.begun = False
        self.over.set()
        self.over = asyncio.Event()


async def disturb(
    producer: Producer,
    rows: Sequence[tuple[Row, Absence]],
    workers: Sequence[WorkerFacts],
    room: int,
    view: PlainView,
) -> FaultFigures | None:
    """Kill a worker amid the last streams, while one of their readers is away.

    Args:
        producer: reads the state of requests.
        rows: all requests and their readers.
        workers: those that may be killed.
        room: sequences that one worker runs at the same time. The kill waits until no more are
            left, so that the streams go on at once and need not wait for others to end.
        view: is told.

    Returns:
        What was done; None if all streams ended before it could be.
    """
    while found := await _wait_for_victim(producer, [row for row, _ in rows], workers, room):
        victim, hit, spared = found
        # One whose stream moves while it is away, if another reader is left to see the pause.
        reader = min(hit if len(hit) > 1 or not spared else spared, key=lambda row: row.tokens)
        absence = next(absence for row, absence in rows if row is reader)
        await _leave(reader, absence)
        left_at, left = reader.tokens, time.monotonic()
        if hit := await _kill_amid(producer, victim, hit):
            break
        absence.end()
    else:
        return None
    killed = time.monotonic()
    view.note(f"a reader leaves after {left_at} tokens of: {reader.title}")
    streams = f"{len(hit)} stream{'s' if len(hit) > 1 else ''}"
    view.note(f"kill -9 {victim.pid}: worker {victim.worker_id} is dead, amid {streams}")
    takeovers = [Takeover(row=row) for row in hit]
    for takeover in takeovers:
        row = takeover.row
        await _see_takeover(producer, row, victim.worker_id, is_read=row is not reader)
        if row is not reader and (pause := row.longest_pause(killed)):
            takeover.index, takeover.pause_ms = pause
            view.note(f"it went on at token {pause[0]} after {pause[1]:.0f} ms: {row.title}")
    published = await _published(producer, reader, left_at + _MISSED)
    back = time.monotonic()
    absence.end()
    await _until(lambda: reader.tokens >= published)
    figures = FaultFigures(
        worker_id=victim.worker_id,
        pid=victim.pid,
        takeovers=takeovers,
        reader=reader,
        left_at=left_at,
        away_ms=1000 * (back - left),
        missed=published - left_at,
        caught_up_ms=1000 * (time.monotonic() - back),
    )
    view.note(f"the reader is back, and has the {figures.missed} tokens that it missed")
    return figures


async def check_streams(producer: Producer, figures: FaultFigures, timeout_s: float) -> None:
    """Run the requests of the killed worker again, undisturbed, and compare all their tokens.

    Requests that had ended before the kill are left out: no worker had to take them over.
    """
    figures.takeovers = [
        takeover
        for takeover in figures.takeovers
        if takeover.row.end is not None
        and takeover.row.end.usage is not None
        and takeover.row.end.usage.attempts > 1
    ]

    async def check(takeover: Takeover) -> None:
        row = takeover.row
        repeat = await producer.generate(
            row.prompt, lane=row.lane, tenant=row.tenant, timeout=timeout_s, **row.options
        )
        await repeat.collect()
        takeover.identical = (repeat.index, repeat.digest) == (row.tokens, row.digest)

    await asyncio.gather(*map(check, figures.takeovers))


async def _wait_for_victim(
    producer: Producer, rows: Sequence[Row], workers: Sequence[WorkerFacts], room: int
) -> tuple[WorkerFacts, list[Row], list[Row]] | None:
    """The worker with most of the last streams, these, and those of others; None if all ended."""
    while running := [row for row in rows if row.end is None]:
        if len(running) <= room and all(row.tokens >= _SEEN for row in running):
            states = await asyncio.gather(*(producer.status(row.id) for row in running))
            owners = [state.worker for state in states]
            victim = max(workers, key=lambda worker: owners.count(worker.worker_id))
            hit = [r for r, o in zip(running, owners, strict=True) if o == victim.worker_id]
            if hit:
                return victim, hit, [row for row in running if row not in hit]
        await asyncio.sleep(_POLL_S)
    return None


async def _leave(reader: Row, absence: Absence) -> None:
    """Have a reader leave its stream; returns when it has, or the stream has ended."""
    absence.wanted = True
    await _until(lambda: absence.begun or reader.end is not None)


async def _kill_amid(producer: Producer, victim: WorkerFacts, hit: Sequence[Row]) -> list[Row]:
    """Kill a worker if one of its streams still runs; returns those that do.

    It stands still meanwhile, so that none ends between the look and the kill.
    """
    running: list[Row] = []
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        states = await asyncio.gather(*(producer.status(row.id) for row in hit))
        running = [row for row, state in zip(hit, states, strict=True) if state.end is None]
    finally:
        os.kill(victim.pid, signal.SIGKILL if running else signal.SIGCONT)
    return running


async def _published(producer: Producer, row: Row, least: int) -> int:
    """Wait until so many tokens of a request are published, or it has ended; how many are."""
    while True:
        status = await producer.status(row.id)
        if status.n >= least or status.end is not None:
            return status.n
        await asyncio.sleep(_POLL_S)


async def _see_takeover(producer: Producer, row: Row, dead: str, *, is_read: bool) -> None:
    """Wait until another worker has the stream and, if it is read, its reader has a token of it."""
    while True:
        status = await producer.status(row.id)
        if status.end is not None or status.worker not in (None, dead):
            break
        await asyncio.sleep(_POLL_S)
    if is_read:
        await _until(lambda: row.tokens > status.n or row.end is not None)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it looks at has no events of its own
        await asyncio.sleep(_POLL_S)

"""The share of an engine's throughput that the way through Redis costs.

A worker process behind Redis, and the same engine alone in a process, generate the same trace. They
take turns of half a second: while one runs, the other is stopped. Neighbouring turns are compared,
because the speed of a shared machine changes within seconds by more than the effect. Both always
have waiting work, so this measures steady throughput.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

from redis.asyncio import Redis

from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk
from penstock.shared.scripts.operations import Bounds, Operations
from penstock.shared.settings import Settings

from ...rounds import Rounds, group_s, process_s
from ..engine.engine_only import EngineAlone
from ..engine.traces import Trace, requests_of
from ..engine.worker_process import worker_process

__all__ = ["measure_redis_cost"]

_TURN_S = 0.5
_SETTLE_S = 0.03
"""Seconds after a stop within which everything already sent arrives."""

_SILENCE_S = 60.0


async def measure_redis_cost(
    settings: Settings,
    rounds: Rounds,
    *,
    trace: Trace,
    slots: int,
    threads: int,
    turns: int,
    progress: Callable[[], None],
) -> None:
    """Give each side ``turns`` turns.

    Adds per pair of turns ``tokens_per_s_in_process``, ``tokens_per_s_through_redis`` and
    ``redis_cost_percent`` (their ratio). Where the system reports CPU times, adds two figures once.
    ``redis_cost_cpu_percent`` is the whole worker's CPU per token over that of the engine alone.
    ``cores_beside_worker`` is how many CPU cores the server and the reader keep busy.

    Args:
        settings: the worker's; Redis and the arguments below override them.
        rounds: receives the figures.
        trace: generated again and again.
        slots: sequences that run at the same time.
        threads: CPU threads of either engine.
        turns: number of turns per side.
        progress: called after each pair.

    Raises:
        PenstockError: a side generated nothing.
    """
    tree = settings.model_dump()
    tree["engine"].update(threads=threads, max_sequences=slots)
    async with EmbeddedRedis() as server:
        tree["redis"].update(url=server.url)
        chosen = Settings.model_validate(tree)
        with EngineAlone(chosen, trace) as alone:
            os.kill(alone.pid, signal.SIGSTOP)
            async with (
                worker_process(chosen) as worker,
                Redis.from_url(server.url) as redis,
                _generated(redis, trace, slots) as reading,
            ):
                sides = (
                    _Side(worker.pid, os.killpg, lambda: reading.tokens, group_s),
                    _Side(alone.pid, os.kill, lambda: alone.tokens, process_s),
                )
                sides[0].stop()
                try:
                    await _take_turns(sides, rounds, turns, redis, progress)
                finally:
                    sides[0].go_on()


class _Side:
    """One of the two sides, which can be stopped and continued.

    Args:
        pid: of its process, or of its group of processes.
        send: sends a signal there.
        tokens: returns the number of tokens generated so far.
        cpu_s: returns the CPU seconds used so far.
    """

    def __init__(
        self,
        pid: int,
        send: Callable[[int, int], None],
        tokens: Callable[[], int],
        cpu_s: Callable[[int], float],
    ) -> None:
        self._pid, self._send, self._cpu_s = pid, send, cpu_s
        self.tokens = tokens
        self.generated, self.ran_s = 0, 0.0
        self._cpu_before = 0.0

    def stop(self) -> None:
        """Stop the side's processes."""
        self._send(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the side's processes."""
        self._send(self._pid, signal.SIGCONT)

    def note_cpu(self) -> None:
        """From here on, :attr:`cpu_s_per_token` counts."""
        self._cpu_before = self._cpu_s(self._pid)

    @property
    def cpu_s_per_token(self) -> float:
        """CPU seconds per token; NaN where that is not known."""
        return (self._cpu_s(self._pid) - self._cpu_before) / self.generated

    async def turn(self) -> float:
        """Run for a turn; tokens per second."""
        before, began = self.tokens(), time.perf_counter()
        self.go_on()
        await asyncio.sleep(_TURN_S)
        self.stop()
        seconds = time.perf_counter() - began
        await asyncio.sleep(_SETTLE_S)
        generated = self.tokens() - before
        if generated <= 0:
            raise PenstockError(f"no token within a turn of {seconds:.1f} s")
        self.generated += generated
        self.ran_s += seconds
        return generated / seconds


async def _take_turns(
    sides: tuple[_Side, _Side],
    rounds: Rounds,
    turns: int,
    redis: Redis,
    progress: Callable[[], None],
) -> None:
    with_redis, without = sides
    for side in sides:
        side.note_cpu()
    beside = await _server_s(redis) + time.process_time()
    for index in range(turns):
        first, second = sides if index % 2 else sides[::-1]
        rates = {first: await first.turn(), second: await second.turn()}
        rounds.add("tokens_per_s_in_process", rates[without])
        rounds.add("tokens_per_s_through_redis", rates[with_redis])
        rounds.add("redis_cost_percent", 100 * (rates[without] / rates[with_redis] - 1))
        progress()
    beside = await _server_s(redis) + time.process_time() - beside
    rounds.add("cores_beside_worker", beside / with_redis.ran_s)
    ratio = with_redis.cpu_s_per_token / without.cpu_s_per_token
    if ratio == ratio:  # not NaN
        rounds.add("redis_cost_cpu_percent", 100 * (ratio - 1))


async def _server_s(redis: Redis) -> float:
    cpu = await redis.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


class _Reading:
    """Counts the tokens that arrive through Redis."""

    def __init__(self) -> None:
        self.tokens = 0
        self.began = asyncio.Event()

    def take(self, chunk: Chunk) -> None:
        """Count the tokens of a chunk."""
        self.tokens += len(chunk.token_ids)
        self.began.set()


@contextlib.asynccontextmanager
async def _generated(redis: Redis, trace: Trace, slots: int) -> AsyncIterator[_Reading]:
    """Keep requests waiting and read their tokens while the ``with`` lasts."""
    keys, reading, room = Keys("bench"), _Reading(), asyncio.Semaphore(2 * slots)

    async def submit() -> None:
        operations = Operations(redis, keys)
        for turn in itertools.count():
            for request in requests_of(trace, f"turn-{turn}"):
                await room.acquire()
                await operations.submit(request, bounds=Bounds(), default_deadline_ms=600_000)

    async def read() -> None:
        async with redis.pubsub() as pubsub:
            await pubsub.psubscribe(keys.channel("*"))
            submitting = asyncio.create_task(submit())
            try:
                while True:
                    message = await pubsub.get_message(True, timeout=_SILENCE_S)
                    if message is None:
                        continue
                    event = unpack_event(message["data"])
                    if isinstance(event, Chunk):
                        reading.take(event)
                    else:
                        room.release()
            finally:
                submitting.cancel()

    task = asyncio.create_task(read())
    try:
        await asyncio.wait_for(reading.began.wait(), _SILENCE_S)
        yield reading
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

"""Measures how long a stream pauses when its worker is killed while another is idle."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from penstock.producer.client import Producer
from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.settings import Settings

from ..report import Check, Report
from .faults.storm_server import OwnServer
from .faults.worker_fleet import Fleet, Machine
from .options import worker_arguments, worker_environment

__all__ = ["StallOptions", "measure_stall"]

_TOKENS = 4000
_KILL_AT = 40
_AFTER = 20
_TIMEOUT_S = 60.0
_SUPERVISED_LIMIT_MS = 50.0
_LOST_LIMIT_MS = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallOptions:
    """Options of the measurement.

    Attributes:
        rounds: kills of each kind.
        lease_ms: lease of the workers in ms.
        step_ms: duration of a step of the synthetic model in ms; the prefill is one step.
    """

    rounds: int = 9
    lease_ms: int = 1000
    step_ms: float = 5.0


async def measure_stall(options: StallOptions, show: Callable[[str, int, int], None]) -> Report:
    """Kill the worker of a stream repeatedly: its engine alone, or its whole machine.

    Raises:
        RedisUnavailable: no server can be started.
        PenstockError: workers do not start, or a stream does not continue.
    """
    settings = _settings(options)
    with tempfile.TemporaryDirectory(prefix="penstock-stall-") as name:
        folder = Path(name)
        async with OwnServer(folder / "redis") as server:
            environment = worker_environment(settings, server.url)
            arguments = worker_arguments(settings)
            async with (
                Fleet(2, arguments, environment, folder / "workers") as fleet,
                Producer(server.url, settings=settings) as producer,
                server.client() as redis,
            ):
                meter = _Meter(producer, redis, Keys(settings.queue.model), fleet)
                stalls: dict[str, list[float]] = {"supervised": [], "lost": []}
                for number in range(2 * options.rounds):
                    kind = "supervised" if number < options.rounds else "lost"
                    show(f"killing workers ({kind})", number, 2 * options.rounds)
                    stalls[kind].append(await meter.stall(lost=kind == "lost"))
                await fleet.finish()
    return _report(options, stalls)


def _settings(options: StallOptions) -> Settings:
    return Settings.model_validate(
        {
            "queue": {"model": "stall"},
            "worker": {"lease_ms": options.lease_ms, "metrics_port": None},
            "model": {"path": "synthetic", "synthetic_step_ms": options.step_ms},
        }
    )


class _Meter:
    """Kills the owner of a stream and measures the gap."""

    def __init__(self, producer: Producer, redis: Redis, keys: Keys, fleet: Fleet) -> None:
        self._producer = producer
        self._redis = redis
        self._keys = keys
        self._fleet = fleet
        self._number = 0

    async def stall(self, *, lost: bool) -> float:
        """Kill once; returns the ms between the last token before and the first token after."""
        await self._fleet.wait_until_ready()
        self._number += 1
        request_id = f"stall-{self._number}"
        await self._producer.submit("a", id=request_id, max_tokens=_TOKENS)
        arrivals: dict[int, float] = {}  # by the index after the chunk
        starts: dict[int, float] = {}
        victim: Machine | None = None
        wanted = _KILL_AT
        async with asyncio.timeout(_TIMEOUT_S), self._producer.stream(request_id) as stream:
            async for chunk in stream:
                arrivals[chunk.stop] = starts[chunk.start] = time.perf_counter()
                if victim is None and chunk.stop >= _KILL_AT:
                    victim = await self._kill_owner(request_id, lost=lost)
                    wanted = chunk.stop
                elif victim is not None and chunk.stop > wanted + _AFTER:
                    wanted = await self._resumed_at(request_id)
                    if wanted and wanted in starts:
                        break
        await self._producer.cancel(request_id)
        if victim is not None and not lost:
            self._fleet.drain(victim)  # its supervisor would wait longer after each death
        if wanted not in arrivals or wanted not in starts:
            raise PenstockError(f"the stream of {request_id} ended before it was continued")
        return (starts[wanted] - arrivals[wanted]) * 1000

    async def _kill_owner(self, request_id: str, *, lost: bool) -> Machine:
        owner = (await self._field(request_id, "worker")).decode()
        victim = next(m for m in self._fleet.machines if m.worker_id == owner)
        if lost:
            self._fleet.kill_machine(victim)
        elif not self._fleet.kill(victim):
            raise PenstockError(f"{victim.name} has no engine process")
        return victim

    async def _resumed_at(self, request_id: str) -> int:
        """The number of tokens at its latest claim."""
        return int(await self._field(request_id, "claimed_tokens"))

    async def _field(self, request_id: str, name: str) -> bytes:
        value: bytes | None = await self._redis.hget(  # type: ignore[misc]
            self._keys.request(request_id), name
        )
        return value or b"0"


def _report(options: StallOptions, stalls: dict[str, list[float]]) -> Report:
    figures: dict[str, int | float] = {
        "rounds": options.rounds,
        "lease_ms": options.lease_ms,
        "step_ms": options.step_ms,
    }
    spread: dict[str, tuple[int | float, int | float]] = {}
    for kind, values in stalls.items():
        name = f"stall_ms_{kind}_median"
        figures[name] = round(statistics.median(values), 2)
        spread[name] = (round(min(values), 2), round(max(values), 2))
    limits = {
        # The prefill of the synthetic model is one step.
        "stall_ms_supervised_median": _SUPERVISED_LIMIT_MS + options.step_ms,
        "stall_ms_lost_median": _LOST_LIMIT_MS + options.lease_ms,
    }
    return Report(
        subject="stall of a stream whose worker is killed, with a second worker idle",
        figures=figures,
        checks=tuple(Check(name, figures[name], limit) for name, limit in limits.items()),
        spread=spread,
    )

"""Calibration: the costs of a real worker, measured by requests made for it."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.gpu_worker.engine_process.step_log import StepLog
from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.protocol.states import Lane

from ...simulate.arrivals import Lengths, SimRequest
from ...simulate.fitted_step_time import FittedCost, MeasuredStep, fit_costs, parse_steps
from ...simulate.step_time import Roofline
from .replay import replay

__all__ = ["Lessons", "Measured", "StepReader", "query_tokens", "scrape"]

_WAIT_S = 30.0
_LONE = 6
_LEVEL_S = 0.5
_WAITING = 4
_MOST_PER_S = 200
"""Requests prepared for each second of a lesson: more than any worker here can end."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The calibration of the simulator.

    Attributes:
        cost: of a step.
        exchange_s: mean round trip with Redis.
        wake_s: from the bell to the claim of an idle worker. Includes all else that a lone
            request's first token takes beside its steps and 1.5 exchanges.
    """

    cost: FittedCost
    exchange_s: float
    wake_s: float


def query_tokens(requests: Sequence[SimRequest]) -> int:
    """Tokens a worker computes for these requests: all but the last of each."""
    return sum(request.tokens - 1 for request in requests)


class StepReader:
    """Reads a worker's log of steps as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    async def next(self, tokens: int) -> list[MeasuredStep]:
        """Wait until the steps since the last call have computed ``tokens``, and return them.

        Raises:
            PenstockError: they do not within half a minute.
        """
        deadline = time.monotonic() + _WAIT_S
        steps: list[MeasuredStep] = []
        while sum(step.work.tokens for step in steps) < tokens:
            if time.monotonic() > deadline:
                raise PenstockError(f"the log {self._path} lacks steps of {tokens} tokens")
            await asyncio.sleep(0.01)
            with self._path.open("rb") as log:
                log.seek(self._read)
                whole, newline, _ = log.read().rpartition(b"\n")
            self._read += len(whole) + len(newline)
            steps += parse_steps(whole.decode().splitlines(), str(self._path))
        return steps


class Lessons:
    """Requests whose steps teach the costs.

    The first ones come alone, which shows how an idle worker wakes up. Then a random number of
    requests stays under way, drawn anew every half second and sometimes above the number of places.
    So requests come and go while others decode, as in a trace.

    Args:
        url: address of Redis.
        keys: names of the shard.
        steps: the worker's log.
        metrics_url: address of its metrics.
        prompt, output: lengths of the requests.
        slots: sequences that the worker runs at the same time.
        batch_tokens: token budget of its steps.
        rng: draws the requests.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        steps: StepReader,
        metrics_url: str,
        *,
        prompt: Lengths,
        output: Lengths,
        slots: int,
        batch_tokens: int,
        rng: random.Random,
    ) -> None:
        self._url, self._keys, self._steps, self._metrics_url = url, keys, steps, metrics_url
        self._prompt, self._output = prompt.sampler(), output.sampler()
        self._slots, self._batch_tokens, self._rng = slots, batch_tokens, rng
        self._name = f"lesson-{time.monotonic_ns():x}"
        self._drawn = 0
        self._measured: list[MeasuredStep] = []
        self._exchanges = self._exchange_seconds = 0.0
        self._woke: list[float] = []

    async def play(self, seconds: float) -> None:
        """Play a lesson of ``seconds``, plus the time its last requests take."""
        before = scrape(self._metrics_url)
        for _ in range(_LONE):
            await self._play_lone()
        levels = [
            self._rng.randint(1, self._slots + _WAITING) for _ in range(1 + int(seconds / _LEVEL_S))
        ]
        heard = await replay(
            self._url, self._keys, self._draw(int(seconds * _MOST_PER_S)), self._rng,
            in_flight=lambda now: levels[min(int(now / _LEVEL_S), len(levels) - 1)],
            seconds=seconds,
        )  # fmt: skip
        self._measured += await self._steps.next(query_tokens([one.request for one in heard]))
        after = scrape(self._metrics_url)
        count, total = "exchange_seconds_count", "exchange_seconds_sum"
        self._exchanges += after[count] - before.get(count, 0.0)
        self._exchange_seconds += after[total] - before.get(total, 0.0)

    async def _play_lone(self) -> None:
        requests = self._draw(1)
        ((one,),) = (await replay(self._url, self._keys, requests, self._rng),)
        steps = await self._steps.next(query_tokens(requests))
        self._measured += steps
        reading = -(-requests[0].prompt_len // self._batch_tokens)
        self._woke.append(one.chunks[0][0] - sum(step.seconds for step in steps[:reading]))

    def _draw(self, count: int) -> list[SimRequest]:
        drawn = []
        for _ in range(max(1, count)):
            self._drawn += 1
            length = self._output(self._rng)
            drawn.append(
                SimRequest(
                    id=f"{self._name}.{self._drawn}",
                    arrival=0.0,
                    prompt_len=self._prompt(self._rng),
                    output_len=length,
                    max_tokens=length,
                    lane=Lane.NORMAL,
                    tenant="a",
                )
            )
        return drawn

    def measured(self, device: Roofline) -> Measured:
        """Fit all lessons so far; ``device`` supplies what they do not tell."""
        exchange_s = self._exchange_seconds / max(1.0, self._exchanges)
        return Measured(
            cost=fit_costs(self._measured, device),
            exchange_s=exchange_s,
            wake_s=max(0.0, statistics.median(self._woke) - 1.5 * exchange_s),
        )

    def write(self, path: Path) -> None:
        """Write the steps as a log for ``penstock simulate --steps``."""
        path.unlink(missing_ok=True)  # the step log appends
        log = StepLog(path)
        for step in self._measured:
            log.write(step.work, step.seconds)
        log.close()


def scrape(url: str) -> dict[str, float]:
    """A worker's metrics by name, without ``penstock_``, summed over their labels."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        text = reply.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^penstock_(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found

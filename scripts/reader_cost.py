#!/usr/bin/env python
"""What a reader costs: CPU of a process that reads hundreds of streams of one-token chunks.

    python scripts/reader_cost.py [--redis URL] [--streams 256] [--rate 10000] [--rounds 3] [--json]

A worker's real edge, in a process of its own, publishes a token for each stream in every step. This
process reads all of them with a ``Producer``, one task for each stream. It reports two figures per
token: its own CPU time, and the token's age when the application had it. It measures one channel
per request, then an inbox. It starts a server unless it is given one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from penstock.producer import Producer, TokenStream
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.tools.bench.queue.client_process import ages_of, stamp
from penstock.tools.bench.queue.edge_harness import WorkerSide


@dataclass(frozen=True)
class Load:
    """What is read: so many streams, together ``rate`` tokens a second, for ``seconds``."""

    streams: int
    rate: float
    seconds: float

    @property
    def steps(self) -> int:
        """Tokens of each stream."""
        return max(1, round(self.rate * self.seconds / self.streams))


async def write(url: str, model: str, load: Load) -> None:
    """Claim all requests, and after a line on stdin publish their tokens."""
    loop = asyncio.get_running_loop()
    async with WorkerSide(url, Keys(model), requests=load.streams) as side:
        await side.claim_all(load.streams)
        print("claimed", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        edge = asyncio.create_task(side.edge.run())
        begin = loop.time()
        for step in range(load.steps):
            side.outbox.post(side.updates(stamp()))
            await asyncio.sleep(begin + (step + 1) * load.streams / load.rate - loop.time())
        side.edge.stop()
        await edge
        await side.edge.drain()


@contextlib.asynccontextmanager
async def writer(url: str, model: str, load: Load) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A writer in a process of its own that has claimed everything."""
    arguments = [str(load.streams), str(load.rate), str(load.seconds)]
    process = spawn_bound(
        [sys.executable, __file__, "--write", url, model, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"claimed\n"
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def read(stream: TokenStream, steps: int, ages: list[int] | None) -> None:
    """Read one stream as an application does, until it has all its tokens."""
    async for chunk in stream:
        if ages is not None:
            ages += ages_of(chunk.text)
        if chunk.stop >= steps:
            return


async def measure(url: str, load: Load, *, inbox: bool) -> dict[str, float]:
    """CPU per token in us, and how old the tokens of every eighth stream were, in ms."""
    model, ages = f"reader-{uuid.uuid4().hex[:8]}", list[int]()
    async with Producer(url, model=model, inbox=inbox) as producer:
        ids = [
            (await producer.submit((1, 2, 3), max_tokens=load.steps + 1)).id
            for _ in range(load.streams)
        ]
        async with writer(url, model, load) as process:
            readers = [
                asyncio.create_task(
                    read(producer.stream(request_id), load.steps, None if index % 8 else ages)
                )
                for index, request_id in enumerate(ids)
            ]
            await asyncio.sleep(1.0)  # subscribed, and every log read
            assert process.stdin is not None
            began = time.process_time()
            process.stdin.write(b"go\n")
            process.stdin.flush()
            await asyncio.gather(*readers)
            spent = time.process_time() - began
        for request_id in ids:
            await producer.cancel(request_id)
    ages.sort()
    return {
        "cpu_us_per_token": 1e6 * spent / (load.streams * load.steps),
        "age_ms_p50": ages[len(ages) // 2] / 1e6,
        "age_ms_p99": ages[len(ages) * 99 // 100] / 1e6,
    }


async def compare(url: str, load: Load, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Both ways in turn, ``rounds`` times."""
    found: dict[str, dict[str, list[float]]] = {"channel": {}, "inbox": {}}
    for _ in range(rounds):
        for name, figures in found.items():
            for figure, value in (await measure(url, load, inbox=name == "inbox")).items():
                figures.setdefault(figure, []).append(round(value, 2))
    return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--write"]:
        url, model, streams, rate, seconds = sys.argv[2:]
        asyncio.run(write(url, model, Load(int(streams), float(rate), float(seconds))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", help="address of a server; without it one is started")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=10_000, help="tokens per second, together")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    load = Load(given.streams, given.rate, given.seconds)
    with contextlib.ExitStack() as stack:
        url = given.redis or stack.enter_context(EmbeddedRedis(password="")).url
        found = asyncio.run(compare(url, load, given.rounds))
    if given.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        for figure, values in figures.items():
            middle = statistics.median(values)
            print(f"{name:8} {figure:18} {middle:8.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()

"""The simulator against a real worker: its process, its Redis and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from simulate.fleets import LEVEL, drawn, engine
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer
from penstock.shared.keys import Keys
from penstock.tools.simulate import (
    ConstantCost,
    Dispatch,
    Lengths,
    Scenario,
    SimRequest,
    simulate,
)

pytestmark = pytest.mark.alone

STEP_S = 0.04
SEQUENCES = 6


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerFactory]:
    factory = WorkerFactory(redis_url, tmp_path)
    yield factory
    factory.close()


async def test_mean_latency_is_what_a_real_worker_shows(
    redis_url: str, workers: WorkerFactory
) -> None:
    """40 requests to a worker that holds 6, at about 0.8 of what it can do: within 20 %.

    What the simulator is told are the times of this very run, since those of another would be
    another machine's where others use this one, too: of a step (40 ms, and what waking up adds) and
    an exchange on average, and when Redis accepted each request. What it is to find is how long
    requests wait and take, by Redis' clock: who is claimed when, and shares a step with whom.
    """
    worker = workers.engine(
        "real", model__path="synthetic", model__synthetic_step_ms=1000 * STEP_S,
        engine__max_sequences=SEQUENCES,
    )  # fmt: skip
    wanted = list(drawn(40, 12.0, output=Lengths("uniform:4:16"), prompt=Lengths("const:8")))
    async with Producer(redis_url) as producer:
        began = asyncio.get_running_loop().time()
        for request in wanted:
            left = began + request.arrival - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, left))  # this is when it is asked for
            await producer.submit(
                [97] * request.prompt_len, id=request.id, lane=request.lane,
                tenant=request.tenant, max_tokens=request.output_len,
            )  # fmt: skip
        async with asyncio.timeout(30):
            for request in wanted:
                await producer.stream(request.id).collect()
    arrived, real_s = await recorded(redis_url, wanted)
    step_s, exchange_s = mean_s(worker, "step"), mean_s(worker, "exchange")
    assert step_s >= STEP_S
    outcome = simulate(
        Scenario(
            name="sim", requests=arrived, workers=1, dispatch=Dispatch.PULL,
            config=engine(max_sequences=SEQUENCES), cost=ConstantCost(step_s), level=LEVEL,
            exchange_s=exchange_s,
        )
    )  # fmt: skip
    assert outcome.total.e2e.mean == pytest.approx(real_s, rel=0.2)


def mean_s(worker: WorkerProcess, what: str) -> float:
    """The mean of a histogram of the worker's, in seconds."""
    return worker.metric(f"{what}_seconds_sum") / worker.metric(f"{what}_seconds_count")


async def recorded(redis_url: str, wanted: list[SimRequest]) -> tuple[list[SimRequest], float]:
    """The requests as they arrived at Redis, and their mean time to the end, in seconds."""
    arrived, spans = [], []
    async with Redis.from_url(redis_url) as client:
        first = 0.0
        for request in wanted:
            raw = await client.hmget(Keys("demo").request(request.id), ["accepted_at", "ended_at"])
            accepted, ended = (int(value) / 1000 for value in raw)
            first = first or accepted
            arrived.append(replace(request, arrival=accepted - first))
            spans.append(ended - accepted)
    return arrived, sum(spans) / len(spans)

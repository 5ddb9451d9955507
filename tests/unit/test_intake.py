"""Claims on their way to the engine: in the pool, side by side, with their times."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.gpu_worker.engine import EngineRequest
from penstock.gpu_worker.intake import Intake
from penstock.gpu_worker.metrics import WorkerMetrics
from penstock.gpu_worker.outbox import Outbox
from penstock.shared.protocol import Request
from penstock.shared.replies import Claim


def claim(id: str, **values: int) -> Claim:
    times = {"age_ms": 0, "queue_ms": 0, "deadline_in_ms": 60_000, **values}
    return Claim(
        id=id, epoch=1, attempts=1, suspect=False, payload=Request(id=id, prompt="x").pack(),
        ttft_ms=None, chunks=(), **times,
    )  # fmt: skip


async def prepared(encode: object, claims: list[Claim]) -> list[EngineRequest]:
    added: list[EngineRequest] = []
    with ThreadPoolExecutor(2) as pool:
        outbox = Outbox(WorkerMetrics(), lambda: None)
        intake = Intake(
            encode, lambda options: None, added.append, outbox, WorkerMetrics(), pool
        )  # type: ignore[arg-type]  # fmt: skip
        intake.accept(claims)
        async with asyncio.timeout(10):
            while intake.preparing:
                await asyncio.sleep(0.005)
    return added


async def test_arrival_and_deadline_are_told_in_the_workers_clock() -> None:
    before = time.monotonic()
    (request,) = await prepared(lambda prompt: [1], [claim("a", age_ms=4000, deadline_in_ms=1500)])
    passed = time.monotonic() - before
    assert request.arrival == pytest.approx(before - 4.0, abs=passed)
    assert request.deadline == pytest.approx(before + 1.5, abs=passed)


async def test_prompts_are_tokenised_side_by_side_and_not_on_the_event_loop() -> None:
    """Each waits for the other, which ends only if both run, and neither on this thread."""
    together = threading.Barrier(2, timeout=10)
    threads = set()

    def encode(prompt: object) -> list[int]:
        threads.add(threading.current_thread())
        together.wait()
        return [1]

    assert len(await prepared(encode, [claim("a"), claim("b")])) == 2
    assert len(threads) == 2
    assert threading.current_thread() not in threads

"""Claims become orders for the engine, with their times."""

from __future__ import annotations

import time

import pytest

from penstock.gpu_worker.intake import Intake
from penstock.gpu_worker.messages import Add
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


def ordered(claims: list[Claim]) -> list[Add]:
    orders: list[Add] = []
    outbox = Outbox(WorkerMetrics(), lambda: None)
    Intake(orders.append, outbox, WorkerMetrics()).accept(claims)
    assert set(outbox.owned) == {claim.id for claim in claims}
    return orders


def test_arrival_and_deadline_are_told_in_the_machines_clock() -> None:
    before = time.monotonic()
    (order,) = ordered([claim("a", age_ms=4000, deadline_in_ms=1500)])
    passed = time.monotonic() - before
    assert order.run == "a#1"
    assert order.arrival == pytest.approx(before - 4.0, abs=passed)
    assert order.deadline == pytest.approx(before + 1.5, abs=passed)

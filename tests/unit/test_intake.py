"""Claims become orders for the engine, with their times."""

from __future__ import annotations

import time

import pytest

from penstock.gpu_worker.edge.claims import Intake
from penstock.gpu_worker.edge.outbox import Outbox
from penstock.gpu_worker.messages import Add
from penstock.gpu_worker.metrics import WorkerMetrics
from penstock.shared.protocol import Request
from penstock.shared.scripts.replies import Claim


def never(run: str) -> None:
    raise AssertionError(f"{run} was aborted")


def claim(id: str, epoch: int = 1, **values: int) -> Claim:
    times = {"age_ms": 0, "queue_ms": 0, "deadline_in_ms": 60_000, **values}
    return Claim(
        id=id, epoch=epoch, attempts=1, suspect=False, payload=Request(id=id, prompt="x").pack(),
        ttft_ms=None, chunks=(), **times,
    )  # fmt: skip


def ordered(claims: list[Claim]) -> list[Add]:
    orders: list[Add] = []
    outbox = Outbox(WorkerMetrics(), lambda: None)
    assert not Intake(orders.append, never, outbox, WorkerMetrics()).accept(claims)
    assert set(outbox.owned) == {claim.id for claim in claims}
    return orders


def test_arrival_and_deadline_are_told_in_the_machines_clock() -> None:
    before = time.monotonic()
    (order,) = ordered([claim("a", age_ms=4000, deadline_in_ms=1500)])
    passed = time.monotonic() - before
    assert order.run == "a#1"
    assert order.arrival == pytest.approx(before - 4.0, abs=passed)
    assert order.deadline == pytest.approx(before + 1.5, abs=passed)


def test_a_request_that_came_back_ends_its_earlier_run() -> None:
    """It was lost without a word, as its lease ended while nothing was to be written."""
    told: list[str] = []
    outbox = Outbox(WorkerMetrics(), lambda: None)
    intake = Intake(lambda add: told.append(f"+{add.run}"), told.append, outbox, WorkerMetrics())
    assert not intake.accept([claim("a"), claim("b")])
    assert not intake.accept([claim("a", epoch=3)])
    assert told == ["+a#1", "+b#1", "a#1", "+a#3"]
    assert set(outbox.owned) == {"a", "b"}


def test_the_same_claim_again_is_left_to_an_audit() -> None:
    """A failover lost the first one, and what the engine says of the run could be of either."""
    told: list[str] = []
    outbox = Outbox(WorkerMetrics(), lambda: None)
    intake = Intake(lambda add: told.append(f"+{add.run}"), told.append, outbox, WorkerMetrics())
    assert not intake.accept([claim("a")])
    assert intake.accept([claim("b"), claim("a")])
    assert told == ["+a#1", "+b#1", "a#1"]
    assert tuple(outbox.owned) == ("b",)

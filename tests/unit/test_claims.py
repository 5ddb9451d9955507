"""Claims become orders for the engine, with their times."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from penstock.gpu_worker.edge.claims import ClaimReceiver
from penstock.gpu_worker.edge.outbox import Outbox
from penstock.gpu_worker.edge.owned_requests import OwnedRequests
from penstock.gpu_worker.messages import Add
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import ModelKind, Reason
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
    owned, metrics = OwnedRequests(), WorkerMetrics()
    outbox = Outbox(owned, metrics, lambda: None)
    assert not ClaimReceiver(orders.append, never, owned, outbox, metrics).accept(claims)
    assert set(owned.by_id) == {claim.id for claim in claims}
    return orders


class Told(list[str]):
    """A receiver of claims, and the names of the runs that it ordered (+) or aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.owned, metrics = OwnedRequests(), WorkerMetrics()
        self.outbox = Outbox(self.owned, metrics, lambda: None)
        self.claims = ClaimReceiver(self.order, self.append, self.owned, self.outbox, metrics)

    def order(self, add: Add) -> None:
        self.append(f"+{add.run}")


def test_arrival_and_deadline_are_told_in_the_machines_clock() -> None:
    before = time.monotonic()
    (order,) = ordered([claim("a", age_ms=4000, deadline_in_ms=1500)])
    passed = time.monotonic() - before
    assert order.run == "a#1"
    assert order.arrival == pytest.approx(before - 4.0, abs=passed)
    assert order.deadline == pytest.approx(before + 1.5, abs=passed)


def test_a_request_that_came_back_ends_its_earlier_run() -> None:
    """It was lost without a word, as its lease ended while nothing was to be written."""
    told = Told()
    assert not told.claims.accept([claim("a"), claim("b")])
    assert not told.claims.accept([claim("a", epoch=3)])
    assert told == ["+a#1", "+b#1", "a#1", "+a#3"]
    assert set(told.owned.by_id) == {"a", "b"}


def test_the_same_claim_again_is_left_to_an_audit() -> None:
    """A failover lost the first one, and what the engine says of the run could be of either."""
    told = Told()
    assert not told.claims.accept([claim("a")])
    assert told.claims.accept([claim("b"), claim("a")])
    assert told == ["+a#1", "+b#1", "a#1"]
    assert tuple(told.owned.by_id) == ("b",)


@pytest.mark.parametrize("kind", ModelKind)
def test_a_request_for_the_other_kind_of_work_ends_invalid(kind: ModelKind) -> None:
    orders: list[Add] = []
    owned, metrics = OwnedRequests(), WorkerMetrics()
    outbox = Outbox(owned, metrics, lambda: None)
    claims = ClaimReceiver(orders.append, never, owned, outbox, metrics, kind)
    payload = Request.build(id="at-once", payload={"x": 1}).pack()
    claims.accept([claim("prompt"), replace(claim("at-once"), payload=payload)])
    served, refused = "prompt", "at-once"
    if kind is not ModelKind.GENERATE:
        served, refused = refused, served
    assert [order.request.id for order in orders] == [served]
    (row,) = outbox.take(8)
    end = unpack_event(row[5])
    assert row[0] == refused
    assert isinstance(end, End)
    assert end.reason is Reason.INVALID
    assert "allowed" in end.message


def test_a_result_that_is_in_the_log_is_not_computed_again() -> None:
    """A script was killed between the chunk and the end of one append."""
    orders: list[Add] = []
    owned, metrics = OwnedRequests(), WorkerMetrics()
    outbox = Outbox(owned, metrics, lambda: None)
    claims = ClaimReceiver(orders.append, never, owned, outbox, metrics, ModelKind.BATCH)
    chunk = Chunk(0, (0,), "", rolling_digest((0,)), result=b"\xc3")
    payload = Request.build(id="a", payload=1).pack()
    claims.accept([replace(claim("a", n=1), payload=payload, chunks=(chunk,))])
    assert not orders
    (row,) = outbox.take(8)
    assert row[:5] == ("a", 1, 1, 0, b"")
    end = unpack_event(row[5])
    assert isinstance(end, End)
    assert (end.n, end.reason) == (1, Reason.STOP)

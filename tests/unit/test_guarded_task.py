"""Guards: one item's trouble costs that item, is counted, and is told in one line."""

from __future__ import annotations

import asyncio
import logging

import pytest
from redis.exceptions import RedisError

from penstock.gpu_worker.edge.guarded_task import Guard, GuardedTask, Ticker
from penstock.gpu_worker.monitoring.heartbeat import HeartbeatWatch
from penstock.gpu_worker.monitoring.logs import configure_logging, printable
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics


def isolated(metrics: WorkerMetrics, task: str) -> float:
    name = "penstock_isolated_errors_total"
    return metrics.registry.get_sample_value(name, {"task": task}) or 0.0


class Nested(Exception):
    """Its message cannot be made, as that of a value nested too deep."""

    def __str__(self) -> str:
        raise RecursionError


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UnicodeError("half \ud800\nforged line"), "UnicodeError: half \\ud800\\nforged line"),
        (Nested(), "Nested"),
        (ValueError("x" * 10**6), "ValueError: " + "x" * 200 + "..."),
    ],
    ids=["surrogate", "no message", "long"],
)
def test_an_error_is_told_in_one_bounded_line(
    error: Exception, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("w")
    metrics = WorkerMetrics()
    assert Guard("ingress", metrics).isolated("item\n2026-01-01 forged", error) == shown
    assert isolated(metrics, "ingress") == 1
    first, *trace = capsys.readouterr().err.splitlines()
    assert "item\\n2026-01-01 forged" in first
    assert all(line.startswith("    ") for line in trace), "no line of it passes for an event"
    assert sum(map(len, trace)) < 10_000
    logging.getLogger("penstock").propagate = True


def test_printable_text_keeps_what_people_write() -> None:
    assert printable("Grüße, 世界 and 🙂") == "Grüße, 世界 and 🙂"
    assert printable("a\tb\x00\udfff") == "a\\tb\\x00\\udfff"


async def test_turns_go_on_after_each_kind_of_error() -> None:
    metrics, watch = WorkerMetrics(), HeartbeatWatch(60)
    errors = [RecursionError("deep"), RedisError("gone"), UnicodeError("half")]
    done = asyncio.Event()

    async def turn() -> float:
        if errors:
            raise errors.pop()
        done.set()
        return 60.0

    task = GuardedTask("ingress", turn, metrics=metrics, watch=watch, patience_s=1)
    task.start()
    await asyncio.wait_for(done.wait(), 60)
    await task.close()
    assert isolated(metrics, "ingress") == 2
    assert metrics.registry.get_sample_value("penstock_redis_errors_total") == 1
    assert watch.look() is None


async def test_close_does_not_wait_for_a_turn_that_swallows_its_cancellation() -> None:
    entered, free = asyncio.Event(), asyncio.Event()

    async def turn() -> float:
        entered.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return 0.0

    task = GuardedTask(
        "bell", turn, metrics=WorkerMetrics(), watch=HeartbeatWatch(60), patience_s=0.05
    )
    task.start()
    await entered.wait()
    await asyncio.wait_for(task.close(), 60)
    free.set()  # the flag ends the loop after this turn
    await task.close()


async def test_a_ticker_calls_until_it_is_closed() -> None:
    ticks = asyncio.Semaphore(0)
    ticker = Ticker(0.001, ticks.release)
    for _ in range(3):
        await asyncio.wait_for(ticks.acquire(), 60)
    ticker.close()

"""Heartbeats: what stands still is noticed, and what could not be seen is not blamed."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request

from prometheus_client import CollectorRegistry

from penstock.gpu_worker.monitoring.health import HealthServer
from penstock.gpu_worker.monitoring.heartbeat import HeartbeatWatch, Watchdog


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def looked_at(watch: HeartbeatWatch, clock: Clock, seconds: float) -> str | None:
    """What the last of several looks finds, four a second."""
    problem = None
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        problem = watch.look()
    return problem


def test_a_loop_that_stands_still_is_named_after_its_limit_and_not_before() -> None:
    clock = Clock()
    watch = HeartbeatWatch(3.0, clock)
    turning, standing = watch.add("turning", 1.0), watch.add("standing")
    for _ in range(3):
        turning.beat()
        assert looked_at(watch, clock, 1) is None
    turning.beat()
    assert looked_at(watch, clock, 1) == "standing has stood still for 3.8 s"
    assert watch.problem is not None
    standing.beat()
    turning.beat()
    assert looked_at(watch, clock, 0.5) is None, "it turns again"


def test_a_loop_that_ended_as_it_should_is_not_missed() -> None:
    clock = Clock()
    watch = HeartbeatWatch(1.0, clock)
    watch.remove(watch.add("ended"))
    assert looked_at(watch, clock, 5) is None


def test_time_in_which_nobody_looked_counts_for_a_second_at_most() -> None:
    """The process was stopped for an hour: its loops could not beat."""
    clock = Clock()
    watch = HeartbeatWatch(2.0, clock)
    heartbeat = watch.add("loop")
    assert looked_at(watch, clock, 0.5) is None
    clock.now += 3600
    assert watch.look() is None
    heartbeat.beat()
    assert looked_at(watch, clock, 1) is None


def test_the_watchdog_shows_life_until_a_loop_stands_still() -> None:
    read_end, write_end = os.pipe()
    watch, ended = HeartbeatWatch(0.1), threading.Event()
    found: list[str] = []

    def end(problem: str) -> None:
        found.append(problem)
        ended.set()

    watchdog = Watchdog(watch, end, write_end)
    assert os.read(read_end, 1) == b"."
    watch.add("loop")
    assert ended.wait(60)
    assert found[0].startswith("loop has stood still")
    watchdog.close()
    os.close(write_end)
    while os.read(read_end, 1 << 16):
        pass
    os.close(read_end)


def status(server: HealthServer, page: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/{page}", timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


class BrokenRegistry(CollectorRegistry):
    def collect(self) -> None:  # type: ignore[override]
        raise ValueError("a metric that cannot be shown")


def test_health_is_that_of_the_loops_and_the_server_is_one_of_them() -> None:
    clock, beats = Clock(), threading.Semaphore(0)
    watch = HeartbeatWatch(1.0, clock)
    server = HealthServer(
        "127.0.0.1",
        0,
        BrokenRegistry(),
        unhealthy=lambda: watch.problem,
        unready=lambda: None,
        beat=beats.release,
    )
    try:
        assert status(server, "healthz") == 200
        watch.add("loop")
        assert looked_at(watch, clock, 2) is not None
        assert status(server, "healthz") == 503
        assert status(server, "metrics") == 500
        assert status(server, "readyz") == 200, "one page's trouble is not another's"
        assert beats.acquire(timeout=60)
    finally:
        server.close()

"""A worker is killed at each point of a request's way: what is published goes on, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from faults.rig import Rig, digest_of, open_rig

from penstock.tools.chaos.faults.worker_fleet import Machine

Point = Callable[[Rig], Awaitable[list[asyncio.Task[None]] | None]]


def swallowed(holding: bytes) -> Point:
    """The server has executed a request that holds this, and no worker hears of it."""

    async def reach(rig: Rig) -> None:
        proxy = rig.env.workers_proxy
        before = proxy.cuts
        proxy.cut_replies(holding, silently=True)
        await rig.until(lambda: proxy.cuts > before, "a reply was swallowed")

    return reach


async def in_prefill(rig: Rig) -> None:
    """Claimed, and nothing published yet; the first step takes long."""
    await rig.until(rig.busy, "something is claimed")


async def pulled_and_not_told(rig: Rig) -> list[asyncio.Task[None]]:
    """A claim of something is swallowed. Idle workers claim, too, and get nothing: not those.

    On a slow machine all that was submitted may have ended by then: each round brings more.
    """
    reach = swallowed(digest_of("claim"))
    await reach(rig)
    more = []
    while not await somebody_is_busy(rig):
        more.append(rig.start(rig.cases(2)))
        await reach(rig)
    return more


async def somebody_is_busy(rig: Rig) -> bool:
    """Whether anybody owns something soon: work may be on its way to the other machine."""
    for _ in range(200):
        if await rig.busy():
            return True
        await asyncio.sleep(0.002)
    return False


SCRIPTS: dict[str, Point] = {
    "pulled and not told": pulled_and_not_told,
    "published and not told": swallowed(digest_of("append")),
    "ended and not told": swallowed(b"completed"),
}


async def unlucky(rig: Rig) -> Machine:
    """The machine that owns something; after an end it may be none, then any."""
    return await rig.busy() or rig.env.fleet.machines[0]


@pytest.mark.parametrize("repetitions", [1, pytest.param(20, marks=pytest.mark.slow)])
async def test_kill_in_prefill(tmp_path: Path, repetitions: int) -> None:
    async with open_rig(tmp_path, step_ms=200.0, tokens=12, lease_ms=30_000) as rig:
        for _ in range(repetitions):
            await kill_at(rig, in_prefill)
        await end(rig, redelivered=repetitions)


@pytest.mark.parametrize("repetitions", [1, pytest.param(20, marks=pytest.mark.slow)])
async def test_kill_after_each_script(tmp_path: Path, repetitions: int) -> None:
    async with open_rig(tmp_path, lease_ms=30_000) as rig:
        redelivered = 0
        for name, point in SCRIPTS.items():
            for _ in range(repetitions):
                await kill_at(rig, point)
                if name != "ended and not told":
                    redelivered += 1
                    assert rig.findings.counts["redelivered"] >= redelivered, name
        await end(rig, redelivered)


async def kill_at(rig: Rig, point: Point) -> None:
    await rig.env.fleet.wait_until_ready()
    running = rig.start(rig.cases(6))
    more = await point(rig) or []
    victim = await unlucky(rig)
    assert rig.env.fleet.kill(victim)
    await asyncio.wait_for(
        asyncio.gather(running, *more), 25
    )  # below the lease: a supervisor saw it
    rig.env.fleet.drain(victim)  # whose supervisor would wait longer after each death


async def end(rig: Rig, redelivered: int) -> None:
    await rig.end()
    assert rig.findings.counts["completed"] == rig.started
    assert rig.findings.counts["dead"] == 0
    assert rig.findings.counts["redelivered"] >= redelivered

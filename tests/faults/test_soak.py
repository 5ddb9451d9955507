"""Minutes of traffic over connections that break: memory, descriptors and keys do not grow."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.rig import Rig, open_rig

from penstock.tools.chaos.checks.final_checks import drain_workers

SECONDS = int(os.environ.get("SOAK_SECONDS", "150"))
PAUSE_S = float(os.environ.get("SOAK_PAUSE_S", "0"))
"""Between two rounds: a long soak need not take the whole machine."""
RETENTION_S = 5
CONSTANT_KEYS = 40
"""More than lanes, tenants and ingress streams of these tests have lasting keys."""


async def sample(rig: Rig) -> dict[str, int]:
    """What may not grow, when no request runs. Sizes in kB."""
    redis, found = rig.env.direct.redis, {"client_descriptors": descriptors(os.getpid())}
    for i, machine in enumerate(rig.env.fleet.machines):
        running = machine.processes()
        assert len(running) == 2, "an edge and its engine, and no worker is replaced in a soak"
        pids = (machine.process.pid, *running)
        for part, pid in zip(("supervisor", "edge", "engine"), pids, strict=True):
            found[f"{part}_{i}_descriptors"] = descriptors(pid)
            found[f"{part}_{i}_kb"] = resident_kb(pid)
    facts = await redis.info("everything")
    return found | {
        "client_tasks": len(asyncio.all_tasks()),
        "redis_kb": int(facts["used_memory"]) // 1024,
        "redis_clients": int(facts["connected_clients"]),
        "redis_scripts": int(facts["number_of_cached_scripts"]),
        "keys": int(await redis.dbsize()),
    }


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def growth(samples: Sequence[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Medians of the second and of the last quarter; in the first everything warms up."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: tuple(round(statistics.median(s[name] for s in part)) for part in (early, late))
        for name in samples[0]
    }


def may_grow(name: str) -> int:
    """How much of it comes and goes, or grows up to a bound that is not reached here."""
    if name.startswith(("edge", "engine")) and name.endswith("_kb"):
        # An edge keeps the encoded keys of its last 4,096 requests (2.5 MB). Connections that break
        # leave cycles, which are collected once there are 50,000 objects (see gc_tuning.py). An
        # engine's prefix cache comes to know all 65,536 blocks of its pool.
        return 12 * 1024
    if name.endswith("_kb"):
        return 2 * 1024
    if name.startswith("client_"):
        return 16  # up to eight commands at once have a connection, with two ends at its proxy
    return 64 if name == "keys" else 4  # keys: of two rounds or so, as retention holds them


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
async def test_nothing_leaks(tmp_path: Path) -> None:
    options = {"tokens": 60, "step_ms": 4, "retention_s": RETENTION_S}
    async with open_rig(tmp_path, workers=2, **options) as rig:
        samples, began = [], time.monotonic()
        while time.monotonic() - began < SECONDS:
            running = rig.start(rig.cases(16))
            # Half-way, connections of all kinds break, the subscribers' too.
            await rig.until(rig.busy, "work is under way")
            for kind in ("normal", "pubsub"):
                await rig.env.direct.redis.execute_command("CLIENT", "KILL", "TYPE", kind)
            await asyncio.wait_for(running, 60)
            samples.append(await sample(rig))
            await asyncio.sleep(PAUSE_S)
        grown = growth(samples)
        print(f"{len(samples)} rounds, {rig.findings.counts['requests']} requests: {grown}")
        for name, (early, late) in grown.items():
            assert late <= early + may_grow(name), f"{name} has grown from {early} to {late}"
        while await rig.env.direct.redis.dbsize() > CONSTANT_KEYS:
            await asyncio.sleep(0.1)
        await drain_workers(rig.env, rig.findings)
        rig.check()

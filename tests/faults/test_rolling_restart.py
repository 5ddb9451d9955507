"""All workers are restarted, one after the other, under load: no token is lost, nobody blamed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faults.rig import open_rig


@pytest.mark.parametrize("rounds", [1, pytest.param(15, marks=pytest.mark.slow)])
async def test_rolling_restart(tmp_path: Path, rounds: int) -> None:
    async with open_rig(tmp_path, workers=3, tokens=300, step_ms=10, lease_ms=180_000) as rig:
        fleet, redis, keys = (
            rig.env.fleet,
            rig.env.direct.redis,
            rig.env.keys,
        )
        for _ in range(rounds):
            cases = rig.cases(12)
            running = rig.start(cases)
            await rig.until(rig.busy, "work is under way")
            busy = await rig.busy()
            # The busy one first, so that there is something to hand over.
            old = sorted(fleet.machines, key=lambda machine: machine is not busy)
            for machine in old:
                fleet.drain(machine)
                await rig.until(lambda m=machine: m.process.poll() is not None, "it ended")
                await fleet.wait_until_ready()
            assert [machine.process.returncode for machine in old] == [0, 0, 0]
            await asyncio.wait_for(running, 150)  # below the lease: nothing was left to it
            for case in cases:
                blames = await redis.hgetall(keys.request(case.id))
                assert int(blames.get(b"deaths", 0)) == int(blames.get(b"blames", 0)) == 0
        await rig.end()
        assert rig.findings.counts["completed"] == 12 * rounds
        assert rig.findings.counts["redelivered"] > 0

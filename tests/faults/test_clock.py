"""Clocks of workers may say what they like: time is Redis' own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faults.rig import open_rig

from penstock.shared.protocol.states import Reason

WRONG_CLOCK = """\
import os, pathlib, time
name = os.environ.get("PENSTOCK_WORKER__NAME", "")
if name:
    shift = 3600 if int(name[1:]) % 2 else -3600
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + shift
    time.time_ns = lambda: now_ns() + shift * 1_000_000_000
    (pathlib.Path(__file__).parent / f"{name}{shift:+}").touch()
"""
DEADLINE_MS = 700


async def test_worker_clocks_an_hour_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One an hour ahead, one behind; streams move between them, and deadlines are kept."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WRONG_CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(site))
    async with open_rig(tmp_path, workers=2) as rig:
        assert sorted(path.name for path in site.glob("w?[+-]*")) == ["w1+3600", "w2-3600"]
        client, redis, keys = (
            rig.env.client,
            rig.env.direct.redis,
            rig.env.keys,
        )
        await client.submit("x", id="late", max_tokens=5000, deadline_ms=DEADLINE_MS)
        running = rig.start(rig.cases(12))
        await rig.until(rig.busy, "work is under way")
        victim = await rig.busy()
        assert victim is not None
        assert rig.env.fleet.kill(victim)
        await asyncio.wait_for(running, 60)
        assert (await client.result("late", check=False)).reason is Reason.DEADLINE
        accepted, ended = map(
            int, await redis.hmget(keys.request("late"), "accepted_at", "ended_at")
        )
        assert DEADLINE_MS <= ended - accepted < DEADLINE_MS + 5000
        rig.check()
        assert rig.findings.counts["completed"] == 12

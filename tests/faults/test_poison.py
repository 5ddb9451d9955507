"""Requests that kill every worker that takes them: they end, and nobody else does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from faults.rig import Rig, mutated, open_rig

from penstock.producer.chaos.aftermath import send_home
from penstock.producer.chaos.ledger import Ended
from penstock.producer.chaos.recount import recount
from penstock.shared.operations import Operations
from penstock.shared.protocol import Reason, Request, rolling_digest

STEP = "        if self._step_s:\n"
CRASH = """\
        for span in plan.spans:
            sequence = span.sequence
            if sequence.token_ids[0] == ord("!") and sequence.num_output_tokens >= {at}:
                import os
                os.kill(os.getpid(), {signal})
"""
SEGV, KILL = 11, 9


async def serve_poison(rig: Rig, poisoned: int, good: int) -> list[Reason]:
    """Poisoned requests among good ones; how the poisoned ones ended."""
    parts = rig.parts
    names = [f"poison-{number}" for number in range(poisoned)]
    await asyncio.gather(
        *(parts.client.submit("!", id=name, max_tokens=40, lane="critical") for name in names)
    )
    bystanders = rig.start([replace(case, returning=0) for case in rig.cases(good)])
    await asyncio.wait_for(bystanders, 200)
    ends = []
    for name in names:
        result = await parts.client.result(name, timeout=200, check=False)
        ends.append(result.reason)
        rig.ledger.ended[name] = Ended(result.end, rolling_digest(result.token_ids))
    await send_home(parts, rig.ledger)
    await recount(parts.link.redis, parts.keys, rig.ledger, exclusive=True)
    rig.check()
    assert rig.ledger.counts["completed"] == good
    letters = await Operations(parts.link.redis, parts.keys).dead_letters()
    assert sorted(letter.id for letter in letters) == names
    assert {Request.unpack(letter.payload).prompt for letter in letters} == {"!"}
    return ends


@pytest.mark.parametrize("at", [0, 5], ids=["in prefill", "at token 5"])
@pytest.mark.parametrize(
    ("poisoned", "good", "workers"),
    [(1, 20, 3), pytest.param(2, 58, 4, marks=pytest.mark.slow)],
)
async def test_poison(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: int,
    good: int,
    workers: int,
    at: int,
) -> None:
    """Five crashes each at most; who was computed beside it goes on elsewhere."""
    crash = CRASH.format(at=at, signal=SEGV)
    path = mutated(tmp_path, "gpu_worker/synthetic.py", STEP, crash + STEP)
    monkeypatch.setenv("PYTHONPATH", path)
    async with open_rig(tmp_path, workers=workers, lease_ms=20_000) as rig:
        assert await serve_poison(rig, poisoned, good) == [Reason.POISON] * poisoned


@pytest.mark.slow
async def test_request_for_whose_memory_its_workers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills for memory with the signal that anybody may send: only a cap ends it."""
    crash = CRASH.format(at=0, signal=KILL)
    path = mutated(tmp_path, "gpu_worker/synthetic.py", STEP, crash + STEP)
    monkeypatch.setenv("PYTHONPATH", path)
    async with open_rig(tmp_path, workers=6, lease_ms=20_000) as rig:
        assert await serve_poison(rig, 1, 20) == [Reason.ATTEMPTS]

"""Requests that kill every worker that takes them: they end, and nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults.rig import Rig, change, mutated, open_rig
from waiting import wait_until

from penstock.gpu_worker.monitoring.oom import OomWatch, find_counter
from penstock.shared.protocol.events import rolling_digest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Reason
from penstock.shared.scripts.operations import Operations
from penstock.tools.chaos.checks.final_checks import drain_workers
from penstock.tools.chaos.checks.key_recount import recount
from penstock.tools.chaos.checks.storm_counts import Ended

STEP = "        ends = time.perf_counter() + self._step_s\n"
CRASH = """\
        for span in plan.spans:
            sequence = span.sequence
            if sequence.token_ids[0] == ord("!") and sequence.num_output_tokens >= {at}:
                import os
                os.kill(os.getpid(), {signal})
"""
LOST = """\
        if any(s.sequence.token_ids[0] == ord("!") for s in plan.spans):
            self._step_s = -1.0
        if self._step_s < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
UNSAVED = '        """A step leaves nothing behind."""\n'
SEGV, KILL = 11, 9
STARVE = "bytearray(1 << 30)"
LOOP = "        loop = asyncio.get_running_loop()\n"


async def serve_poison(rig: Rig, poisoned: int, good: int) -> list[Reason]:
    """Poisoned requests among good ones; how the poisoned ones ended."""
    env = rig.env
    names = [f"poison-{number}" for number in range(poisoned)]
    await asyncio.gather(
        *(env.client.submit("!", id=name, max_tokens=40, lane="critical") for name in names)
    )
    bystanders = rig.start([replace(case, returning=0) for case in rig.cases(good)])
    await asyncio.wait_for(bystanders, 200)
    ends = []
    for name in names:
        result = await env.client.result(name, timeout=200, check=False)
        ends.append(result.reason)
        rig.findings.ended[name] = Ended(
            result.end, rolling_digest(result.token_ids), "critical", "default"
        )
    await drain_workers(env, rig.findings)
    await recount(env.direct.redis, env.keys, rig.findings, exclusive=True)
    rig.check()
    assert rig.findings.counts["completed"] == good
    letters = await Operations(env.direct.redis, env.keys).dead_letters()
    assert sorted(letter.id for letter in letters) == names
    assert {Request.unpack(letter.payload).prompt for letter in letters} == {"!"}
    return ends


@pytest.mark.parametrize(
    ("poisoned", "good", "workers", "at"),
    [
        (1, 20, 3, 5),
        pytest.param(1, 20, 3, 0, marks=pytest.mark.slow),
        pytest.param(2, 58, 4, 0, marks=pytest.mark.slow),
        pytest.param(2, 58, 4, 5, marks=pytest.mark.slow),
    ],
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
    path = mutated(tmp_path, "gpu_worker/engine_process/synthetic_model.py", STEP, crash + STEP)
    monkeypatch.setenv("PYTHONPATH", path)
    async with open_rig(tmp_path, workers=workers, lease_ms=20_000) as rig:
        assert await serve_poison(rig, poisoned, good) == [Reason.POISON] * poisoned


async def test_request_with_which_the_device_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process ends by itself, and no step works any more: nobody else fails with it."""
    path = mutated(tmp_path, "gpu_worker/engine_process/synthetic_model.py", STEP, LOST + STEP)
    asks = "        if self._step_s < 0:\n            raise RuntimeError('the device is lost')\n"
    change(path, "gpu_worker/engine_process/synthetic_model.py", UNSAVED, UNSAVED + asks)
    monkeypatch.setenv("PYTHONPATH", path)
    async with open_rig(tmp_path, workers=3, lease_ms=20_000) as rig:
        assert await serve_poison(rig, 1, 20) == [Reason.POISON]


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 512 MiB, to be joined by writing into its ``cgroup.procs``."""
    mount, bound = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not mount.is_dir():
        mount, bound = Path("/sys/fs/cgroup"), "memory.max"
    group = mount / f"penstock-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / bound).write_text(str(512 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "end of all that is in it")
    group.rmdir()


def within(group: Path, script: str) -> subprocess.Popen[bytes]:
    """Run Python in a cgroup; it goes on when it is given a line."""
    join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\nprint(flush=True)\ninput()\n"
    return subprocess.Popen(
        [sys.executable, "-c", join + script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_kill_for_memory_is_told_from_a_kill_by_hand(memory_cgroup: Path) -> None:
    for script, starved in ((STARVE, True), ("import os; os.kill(os.getpid(), 9)", False)):
        with within(memory_cgroup, script) as process:
            assert process.stdout is not None
            process.stdout.readline()
            counter = find_counter(process.pid)
            assert counter is not None
            assert counter.parent == memory_cgroup
            watch = OomWatch(counter)
            assert not watch.killed_lately()
            process.communicate(b"\n")
        assert process.returncode == -KILL
        assert watch.killed_lately() == starved


def hungry_workers(tmp_path: Path, group: Path) -> str:
    """Where workers are found that join the cgroup, and take more than it has for a poison."""
    starve = CRASH.format(at=0, signal=KILL).replace(f"os.kill(os.getpid(), {KILL})", STARVE)
    path = mutated(tmp_path, "gpu_worker/engine_process/synthetic_model.py", STEP, starve + STEP)
    join = f"        open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    change(path, "gpu_worker/supervisor.py", LOOP, join + LOOP)
    return path


async def test_kill_for_memory_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_cgroup: Path
) -> None:
    """As a crash is, and a kill by hand is not."""
    monkeypatch.setenv("PYTHONPATH", hungry_workers(tmp_path, memory_cgroup))
    async with open_rig(tmp_path, workers=1, lease_ms=20_000) as rig:
        redis, record = rig.env.direct.redis, rig.env.keys.request("poison")
        await rig.env.client.submit("!", id="poison", max_tokens=40)
        wanted = [b"1", b"1"]

        async def blamed() -> bool:
            return await redis.hmget(record, "deaths", "blames") == wanted

        await rig.until(blamed, "a blame")
        await rig.env.client.cancel("poison")


@pytest.mark.slow
async def test_request_that_takes_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_cgroup: Path
) -> None:
    """Five kills by the kernel, and it ends."""
    monkeypatch.setenv("PYTHONPATH", hungry_workers(tmp_path, memory_cgroup))
    async with open_rig(tmp_path, workers=3, lease_ms=20_000) as rig:
        assert await serve_poison(rig, 1, 20) == [Reason.POISON]


@pytest.mark.slow
async def test_request_for_whose_memory_its_workers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who is not the kernel, with the signal that anybody may send: only a cap ends it."""
    crash = CRASH.format(at=0, signal=KILL)
    path = mutated(tmp_path, "gpu_worker/engine_process/synthetic_model.py", STEP, crash + STEP)
    monkeypatch.setenv("PYTHONPATH", path)
    async with open_rig(tmp_path, workers=6, lease_ms=20_000) as rig:
        assert await serve_poison(rig, 1, 20) == [Reason.ATTEMPTS]

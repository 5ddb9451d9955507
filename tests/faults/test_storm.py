"""Storms: everything at once, and every promise holds. And that they would notice if not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from faults.rig import mutated

from penstock.producer.cli import main
from penstock.shared.local.tasks import end_tasks
from penstock.shared.protocol.events import Chunk
from penstock.tools.chaos import Fault, Invariant, Storm, StormOptions, StormResult
from penstock.tools.chaos.checks.sweep_times import SweepWatch
from penstock.tools.chaos.storm.readers import Reading

SHORT = {"workers": 4, "in_flight": 60, "tokens": 60, "step_ms": 15.0}


async def run(**options: Any) -> StormResult:
    return await Storm(StormOptions(**{**SHORT, **options})).run()


def check_held(result: StormResult) -> None:
    assert not result.findings.found, "\n".join(map(str, result.findings.violations))


@pytest.mark.alone
async def test_short_storm_of_everything() -> None:
    result = await run(seconds=12, seed=1)
    check_held(result)
    counts, faults = result.findings.counts, result.counts
    assert counts["migrated"] >= 1  # how many of them, the machine decides
    assert faults["worker_kills"] >= 1
    assert faults["worker_stops"] >= 1
    for name in ("redis_kills", "connection_resets", "replies_cut", "half_opens", "script_flushes"):
        assert faults[name] >= 1, name
    for kind in ("live", "returning", "jumping", "slow", "late"):
        assert counts[f"{kind}_readers"] >= 5, kind
    assert counts["cancelled"] >= 1
    assert counts["conflicts_refused"] >= 1


async def test_given_server_is_left_as_it_was(redis_url: str) -> None:
    faults = frozenset({Fault.STOP, Fault.RESET, Fault.SLOW_READERS, Fault.FLUSH})
    limit = "client-output-buffer-limit"
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.set("somebody's", "1")
        before = await client.config_get(limit)
        check_held(await run(seconds=2, faults=faults, redis=redis_url))
        assert await client.keys("*") == [b"somebody's"]
        assert await client.config_get(limit) == before


class StutteringReading(Reading):
    """A reader that takes every tenth chunk twice."""

    def take(self, chunk: Chunk) -> None:
        super().take(chunk)
        if chunk.start % 10 == 5:
            super().take(chunk)


async def test_a_broken_reader_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.chaos.storm.readers.Reading", StutteringReading)
    result = await run(seconds=2, faults=frozenset(), workers=2)
    assert result.findings.found[Invariant.READERS_EXACT] > 0


BROKEN = {
    "a worker that is not fenced": (
        "shared/scripts/lua/append.lua",
        "if tonumber(v[2]) ~= epoch or v[4] ~= worker then return 2, tokens end",
        "start = tokens",
        {Fault.STOP},
        {Invariant.READERS_AGREE},
    ),
    "a continuation that begins anew": (
        "gpu_worker/edge/claims.py",
        "output_ids=() if several else tuple(i for c in claim.chunks for i in c.token_ids)",
        "output_ids=()",
        {Fault.STOP, Fault.DRAIN},
        {Invariant.READERS_AGREE},
    ),
    "counters that are not kept": (
        "shared/scripts/lua/lib/finish.lua",
        "count_queued(-1, rec.lane, rec.tenant, rec.cost, rec.bytes)",
        "",
        {Fault.STOP},
        {Invariant.COUNTERS},
    ),
    "logs that never expire": (
        "shared/scripts/lua/lib/finish.lua",
        "redis.call('PEXPIRE', log, retention)",
        "redis.call('PERSIST', log)",
        set(),
        {Invariant.NO_LEAKS},
    ),
}


NOTICED_AT_ONCE = ("a worker that is not fenced",)


@pytest.mark.parametrize(
    "what",
    [
        what if what in NOTICED_AT_ONCE else pytest.param(what, marks=pytest.mark.slow)
        for what in BROKEN
    ],
)
async def test_a_broken_worker_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Workers run changed code; the storm's own clients do not."""
    path, old, new, faults, expected = BROKEN[what]
    monkeypatch.setenv("PYTHONPATH", mutated(tmp_path, path, old, new))
    result = await run(seconds=5, faults=frozenset(faults), in_flight=40, pace=2.0)
    assert expected <= set(result.findings.found), result.findings.violations


def test_which_sweep_is_to_keep_a_deadline() -> None:
    watch = SweepWatch()
    for swept_ms in (1000, 1300):
        watch.note(swept_ms)
    due = (900, 1000, 1001, 1301)
    assert [watch.next_after(due_ms) for due_ms in due] == [1000, 1000, 1300, None]


@pytest.mark.alone
@pytest.mark.slow
async def test_a_deadline_that_is_kept_late_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under this seed four of the first forty run for long after their deadline, if let."""
    monkeypatch.setattr("penstock.producer.stream._EXPIRY_GRACE_S", 60.0)  # readers would end them
    when = "DEADLINES, '-inf', now, 'LIMIT', 0, MAX_EXPIRED"
    late = when.replace("now", "now - 2000")
    monkeypatch.setenv("PYTHONPATH", mutated(tmp_path, "shared/scripts/lua/sweep.lua", when, late))
    result = await run(seconds=2, seed=95, faults=frozenset(), in_flight=40, tokens=240)
    assert result.findings.found[Invariant.ONE_END] > 0


async def test_a_task_that_swallows_its_cancellation_is_ended_all_the_same() -> None:
    swallowed = 0

    async def wait_forever() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed > 2:
                    raise

    task = asyncio.create_task(wait_forever())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task]), 30)
    assert task.cancelled()
    assert swallowed == 3


def chaos(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """The command's JSON; fails if not everything held."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.tools.chaos", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("fault", Fault)
def test_a_storm_of_one_kind(fault: Fault) -> None:
    chaos("--seconds", "20", f"--{fault}", timeout_s=200)


def test_servers_elsewhere_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for url, why in (
        ("redis://192.0.2.1:6379", "loopback"),
        ("redis://example.com", "loopback"),
        ("rediss://127.0.0.1", "loopback"),
        ("redis://127.0.0.1/0?timeuot=1", "it has no option timeuot"),
    ):
        assert main(["chaos", "--redis", url]) == 2
        assert why in capsys.readouterr().err


def test_the_command_without_the_program_refuses_in_a_line_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.tools.chaos", "--redis", "redis://127.0.0.1:1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "cannot reach Redis at redis://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr

"""``penstock batch`` and ``penstock schedule`` as a shell runs them."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from batches.conftest import completion_lines
from waiting import wait_until

from penstock.producer.cli.app import main
from penstock.shared.settings import Settings

Start = Callable[[], subprocess.Popen[bytes]]


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs the program in this process; the commands' output is what a shell would get."""
    monkeypatch.setenv("REDIS_URL", str(settings.redis.url))
    monkeypatch.setenv("PENSTOCK_BATCHES__STORAGE", settings.batches.storage)

    def run(*arguments: str) -> Done:
        capfd.readouterr()
        code = main(arguments)
        return Done(code, *capfd.readouterr())

    return run


def test_batch_by_its_commands(
    synthetic_worker: None, drivers: Start, run: Run, folder: Path, tmp_path: Path
) -> None:
    drivers()
    file = tmp_path / "nightly.jsonl"
    file.write_bytes(completion_lines(5))
    done = run("batch", "submit", str(file), "--tenant", "shell", "--wait")
    assert done.returncode == 0, done.stderr
    name, summary = done.stdout.splitlines()
    assert summary == "completed: 5 of 5 lines completed, 0 failed"
    results = run("batch", "results", name)
    assert len([json.loads(line) for line in results.stdout.splitlines()]) == 5
    listed = json.loads(run("batch", "list", "--tenant", "shell", "--json").stdout)
    assert [(item["id"], item["state"]) for item in listed["batches"]] == [(name, "completed")]
    assert run("batch", "cancel", name).stdout == "completed\n"
    log = (folder / "driver-0.log").read_text()
    [address] = re.findall(r"metrics: (http://127.0.0.1:\d+/metrics)", log)

    def counted() -> bool:
        with urllib.request.urlopen(address, timeout=30) as page:
            return 'penstock_batches_ended_total{state="completed"} 1.0' in page.read().decode()

    wait_until(counted, "the batch was counted", 60)


def test_batch_that_fails_is_the_exit_code_of_who_waits(
    drivers: Start, run: Run, tmp_path: Path
) -> None:
    drivers()
    file = tmp_path / "x.jsonl"
    file.write_bytes(completion_lines(1) + b"{}\n")
    done = run("batch", "submit", str(file), "--wait")
    assert (done.returncode, done.stdout.splitlines()[1:]) == (
        1, ["failed: 0 of 1 lines completed, 0 failed"],
    )  # fmt: skip
    assert "line 2: custom_id" in done.stderr


def test_bad_input_is_one_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(completion_lines(1))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for arguments, message in [
        (("batch", "status", "batch_none"), "no batch 'batch_none'"),
        (("batch", "submit", str(tmp_path / "none")), "readable file"),
        (("batch", "submit", str(empty)), "line 1"),
        (("batch", "submit", str(file), "--window", "1y"), "90m, 24h, 7d"),
        (("batch", "submit", str(file), "--endpoint", "/v1/x"), "/v1/chat/completions"),
        (("batch", "status", "\udcff"), "no batch"),
        (("batch", "list", "--tenant", "\udcff"), "tenant"),
        (("schedule", "add", "x", "--batch", str(file)), "cron"),
        (("schedule", "add", "0 2 * * *", "--batch", str(file), "--window", "1s"), "window"),
        (("schedule", "remove", "none"), "no schedule 'none'"),
        (("webhook", "retry", "none"), "webhook list"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_storage_that_fails_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl").write_bytes(completion_lines(1))
    (tmp_path / "taken").touch()
    monkeypatch.setenv("PENSTOCK_BATCHES__STORAGE", str(tmp_path / "taken"))
    done = run("batch", "submit", str(tmp_path / "x.jsonl"))
    assert done.returncode != 0
    assert "check the space and rights of batches.storage" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_schedule_by_its_commands(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "nightly.jsonl"
    file.write_bytes(completion_lines(1))
    added = run("schedule", "add", "0 2 * * *", "--batch", str(file))
    assert re.fullmatch(r"nightly: next at \d{4}-\d\d-\d\d 02:00 UTC\n", added.stdout)
    assert "02:00 UTC" in run("schedule", "list").stdout
    listed = json.loads(run("schedule", "list", "--json").stdout)["schedules"]
    assert [item["cron"] for item in listed] == ["0 2 * * *"]
    assert run("schedule", "remove", "nightly").returncode == 0


def test_webhooks_that_were_given_up(run: Run) -> None:
    assert json.loads(run("webhook", "list", "--json").stdout) == {"webhooks": []}
    assert "last attempt due" in run("webhook", "list").stdout

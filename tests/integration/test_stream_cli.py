"""The commands against a real server and a worker process that needs no model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from waiting import is_running, wait_until

from penstock.producer.cli import main
from penstock.producer.cli.demo.command import run_demo
from penstock.producer.cli.demo.view import JsonView, PlainView, make_view
from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.settings import load_settings

TESTS = Path(__file__).resolve().parents[1]
WORKER = [sys.executable, str(TESTS / "scripted_worker.py")]
KEYS = Keys("demo")


@pytest.fixture
def environment(redis_url: str) -> dict[str, str]:
    return {**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": str(TESTS)}


@pytest.fixture
def worker(environment: dict[str, str], tmp_path: Path) -> Iterator[None]:
    ready = tmp_path / "ready.json"
    process = spawn_bound([*WORKER, "--ready-file", str(ready)], env=environment)
    wait_until(ready.exists, "the scripted worker is ready", 60)
    yield
    process.kill()
    process.wait()


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def penstock(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the program in this process."""
    monkeypatch.setenv("REDIS_URL", redis_url)

    def run(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(arguments)
        return Done(code, *capsys.readouterr())

    return run


def output(count: int) -> str:
    return "".join(f"<{i}>" for i in range(count))


@pytest.mark.usefixtures("worker")
def test_submit_shows_the_text_and_nothing_else_in_a_pipe(penstock: Run) -> None:
    done = penstock("submit", "hello", "--max-tokens", "6", "--lane", "critical")
    assert (done.returncode, done.stdout) == (0, output(6) + "\n")
    assert done.stderr == (
        "completed (length), 3 prompt + 6 output tokens, queue 1 ms, first token 2 ms\n"
    )
    from_stdin = penstock("submit", "-", "--max-tokens", "2", stdin="grüße\n".encode())
    assert (from_stdin.returncode, from_stdin.stdout) == (0, output(2) + "\n")


@pytest.mark.usefixtures("worker")
def test_submit_streams_json_lines(penstock: Run) -> None:
    done = penstock("submit", "hello", "--max-tokens", "3", "--id", "a", "--json", "--chat")
    assert done.returncode == 0
    assert done.stderr == ""
    first, *chunks, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert first.pop("accepted_at") > 0
    assert first == {
        "event": "submitted", "id": "a", "duplicate": False, "state": "queued", "n": 0,
        "waiting": 1,
    }  # fmt: skip
    assert [chunk["event"] for chunk in chunks] == ["chunk"] * len(chunks)
    assert [t for chunk in chunks for t in chunk["token_ids"]] == [0, 1, 2]
    assert "".join(chunk["text"] for chunk in chunks) == output(3)
    last["usage"] = {name: count for name, count in last["usage"].items() if count}
    assert last == {
        "event": "end", "id": "a", "n": 3, "state": "completed", "reason": "length", "message": "",
        "usage": {
            "prompt_tokens": 3, "output_tokens": 3, "queue_ms": 1, "ttft_ms": 2, "attempts": 1,
        },
    }  # fmt: skip


@pytest.mark.usefixtures("worker")
def test_submit_now_and_read_later(penstock: Run) -> None:
    submitted = penstock("submit", "hello", "--max-tokens", "5", "--no-stream")
    assert submitted.returncode == 0
    request_id = submitted.stdout.strip()
    assert penstock("result", request_id).stdout == output(5) + "\n"
    result = json.loads(penstock("result", request_id, "--json").stdout)
    assert (result["id"], result["text"], result["state"]) == (request_id, output(5), "completed")
    assert result["token_ids"] == list(range(5))
    assert penstock("stream", request_id, "--from-index", "3").stdout == "<3><4>\n"
    again = penstock("cancel", request_id)
    assert (again.returncode, again.stdout) == (0, "was already completed\n")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("command", ["submit", "stream", "result"])
def test_a_request_that_failed_gives_exit_code_1(penstock: Run, command: str) -> None:
    done = penstock("submit", "please fail", "--id", "x", "--max-tokens", "2")
    if command != "submit":
        done = penstock(command, "x")
    assert done.returncode == 1
    assert done.stdout == output(2) + "\n"
    message = "error: request 'x' ended failed (engine_error): as the test wished\n"
    assert done.stderr == message
    as_json = penstock(*(("result", "x") if command == "submit" else (command, "x")), "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout.splitlines()[-1])["reason"] == "engine_error"


@pytest.mark.usefixtures("worker")
def test_a_model_that_nobody_serves(penstock: Run) -> None:
    """After a second a note says so and names what is served; the deadline ends the request."""
    done = penstock("submit", "hello", "--model", "demi", "--deadline-ms", "4000", "--id", "x")
    note, error = done.stderr.splitlines()
    assert note == (
        "no worker serves model 'demi', shard 0, now; served on this server: demo (shard 0); "
        "the request waits until its deadline"
    )
    assert error == "error: request 'x' ended expired (deadline)"
    assert (done.returncode, done.stdout) == (1, "")
    waited = penstock("submit", "hello", "--model", "demi", "--max-queue-ms", "100", "--json")
    assert waited.stderr == ""
    assert json.loads(waited.stdout.splitlines()[-1])["reason"] == "queue_timeout"


def test_cancel_and_timeout_without_any_worker(penstock: Run) -> None:
    submitted = json.loads(penstock("submit", "x", "--no-stream", "--json").stdout)
    assert submitted["state"] == "queued"
    for command in ("result", "stream"):
        waited = penstock(command, submitted["id"], "--timeout", "0.1")
        assert waited.returncode == 1
        assert waited.stderr == (f"error: request '{submitted['id']}' did not end within 0.1 s\n")
    done = json.loads(penstock("cancel", submitted["id"], "--json").stdout)
    assert done == {"id": submitted["id"], "state": "cancelled", "changed": True}
    unknown = penstock("cancel", "nobody")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: request 'nobody' is not known")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_what_submit_shows(
    environment: dict[str, str], redis_url: str, number: signal.Signals, code: int
) -> None:
    argv = [sys.executable, "-m", "penstock.producer.cli", "submit", "x", "--id", "mine"]
    with (
        program(argv, environment) as process,
        redis.Redis.from_url(redis_url) as client,
    ):
        wait_until(lambda: client.pubsub_channels(), "the command follows its request", 60)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (code, b"", b"cancelled mine\n")
        assert client.hget(KEYS.request("mine"), "state") == b"cancelled"


PIPED = f"{sys.executable} -m penstock.producer.cli submit x --id mine --max-tokens 3000 --json"


def leave_the_pipe(environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Read the first line of a command's output, and no more."""
    return subprocess.run(
        ["bash", "-c", f"{PIPED} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, env=environment, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.usefixtures("worker")
def test_a_reader_that_leaves_the_pipe_cancels(environment: dict[str, str], redis_url: str) -> None:
    done = leave_the_pipe(environment)
    assert json.loads(done.stdout)["event"] == "submitted"
    assert (done.returncode, done.stderr) == (1, b"cancelled mine\n")
    with redis.Redis.from_url(redis_url) as client:
        assert client.hget(KEYS.request("mine"), "state") == b"cancelled"


def test_a_reader_that_leaves_before_anything_is_written(
    environment: dict[str, str], redis_url: str
) -> None:
    """No worker: nothing will be written by which the command could notice."""
    done = leave_the_pipe(environment)
    assert (done.returncode, done.stderr) == (1, b"cancelled mine\n")
    with redis.Redis.from_url(redis_url) as client:
        assert client.hget(KEYS.request("mine"), "state") == b"cancelled"


def in_a_shell(line: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m penstock.producer.cli {line}"],
        capture_output=True, text=True, env=environment, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("options", ["--no-stream", "--no-stream --json", "--json"])
def test_output_that_cannot_be_written(
    environment: dict[str, str], redis_url: str, options: str
) -> None:
    done = in_a_shell(f"submit x --id mine {options} >/dev/full", environment)
    assert (done.returncode, done.stderr) == (
        1,
        "cancelled mine\nerror: the output cannot be written: No space left on device\n",
    )
    with redis.Redis.from_url(redis_url) as client:
        assert client.hget(KEYS.request("mine"), "state") == b"cancelled"


@pytest.mark.usefixtures("worker")
def test_streams_that_were_closed_before_the_start(environment: dict[str, str]) -> None:
    done = in_a_shell("submit x --max-tokens 2 >&-", environment)
    assert (done.returncode, done.stderr.split()[:2]) == (0, ["completed", "(length),"])
    done = in_a_shell("submit x --max-tokens 2 2>&-", environment)
    assert (done.returncode, done.stdout) == (0, output(2) + "\n")
    done = in_a_shell("submit - <&-", environment)
    assert (done.returncode, done.stderr[:22]) == (2, "error: prompt: got '';")


def test_the_demo_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    assert run_demo(load_settings(), make_view(json=True), WORKER, faults=False) == 0
    facts = json.loads(capsys.readouterr().out)
    figures, requests = facts["figures"], facts["requests"]
    assert figures["requests"] == figures["completed"] == len(requests) == 12
    assert figures["output_tokens"] == sum(r["output_tokens"] for r in requests)
    assert 1 <= figures["mean_batch"] <= 4
    assert (figures["kv_blocks_peak"], figures["kv_blocks_total"]) == (7, 100)
    assert {(r["lane"], r["tenant"]) for r in requests} == {
        (lane, tenant) for lane in ("critical", "normal", "batch") for tenant in ("app", "docs")
    }
    for request in requests:
        assert request["text"] == output(request["output_tokens"])
        assert (request["state"], request["reason"]) == ("completed", "length")
        assert request["mean_itl_ms"] > 0


def test_the_demo_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], redis_url: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    settings = load_settings({"redis.url": redis_url})
    assert run_demo(settings, make_view(json=False), WORKER, faults=False) == 0
    out = capsys.readouterr().out
    assert "using the configured Redis" in out
    assert "\x1b" not in out
    assert "12 of 12 completed" in out
    assert "KV peak 7 of 100 blocks (7.0 %)" in out
    assert out.count("completed   ") == 12  # a line as each ends
    with redis.Redis.from_url(redis_url) as client:
        assert client.client_list(_type="pubsub") == []


SYNTHETIC = [sys.executable, "-m", "penstock.gpu_worker", "worker", "--model", "synthetic"]


@pytest.mark.parametrize("gateway", [False, True], ids=["python", "http"])
def test_the_demo_kills_a_worker_and_every_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    redis_url: str,
    gateway: bool,
) -> None:
    """Real supervised workers; its requests leave nothing out, whoever ran them."""
    monkeypatch.setenv("PENSTOCK_MODEL__SYNTHETIC_STEP_MS", "40")
    settings = load_settings({"redis.url": redis_url})
    assert run_demo(settings, make_view(json=True), SYNTHETIC, gateway=gateway) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["figures"]["completed"] == 12
    faults = facts["faults"]
    assert not is_running(faults["killed"]["pid"])
    assert faults["takeovers"], "the worker had streams"
    assert all(takeover["identical"] for takeover in faults["takeovers"])
    reader = faults["reader"]
    requests = {request["id"]: request for request in facts["requests"]}
    assert 8 <= reader["left_at"] < requests[reader["id"]]["output_tokens"]
    for takeover in faults["takeovers"]:
        request = requests[takeover["id"]]
        assert len(request["text"]) == request["output_tokens"] > 8  # one letter per token
        if takeover["id"] != reader["id"]:
            assert 8 <= takeover["index"] < request["output_tokens"]
            assert takeover["pause_ms"] > 0


def test_a_demo_whose_worker_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    view = JsonView(make_view(json=True).console)
    with pytest.raises(PenstockError, match="exit code 2: no such model"):
        run_demo(load_settings(), view, [*WORKER, "--refuse"])


def test_a_demo_whose_worker_dies(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    settings = load_settings({"redis.url": redis_url})
    dying = [*WORKER, "--die-after", "20"]
    with pytest.raises(PenstockError, match="exit code 1: out of luck"):
        run_demo(settings, PlainView(make_view(json=True).console), dying, faults=False)
    with redis.Redis.from_url(redis_url) as client:
        states = [client.hget(key, "state") for key in client.scan_iter(KEYS.request("*"))]
        assert len(states) == 12
        assert set(states) <= {b"cancelled", b"completed"}


DEMO = """
import sys
from penstock.producer.cli import main
from penstock.producer.cli.demo import command
command.worker_command = lambda model: {worker!r}
sys.exit(main(["demo"]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_demo_leaves_nothing_running(
    environment: dict[str, str], number: signal.Signals
) -> None:
    del environment["REDIS_URL"]
    # No request ends: the worker takes none.
    code = DEMO.format(worker=[*WORKER, "--sequences", "0"])
    with program([sys.executable, "-c", code], environment) as process:
        assert process.stdout is not None
        seen = b""
        while b"12 requests" not in seen:
            line = process.stdout.readline()
            assert line, f"the demo ended: {seen!r}"
            seen += line
        children = children_of(process.pid)
        assert len(children) == 3  # a Redis server and two workers
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 130)
        assert err == b""
    wait_until(lambda: not any(map(is_running, children)), "server and worker have ended")


@contextlib.contextmanager
def program(argv: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with spawn_bound(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found

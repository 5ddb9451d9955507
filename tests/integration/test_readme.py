"""What the documentation tells a newcomer to run, run as it stands against a real worker."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from workers import WorkerFactory

from penstock.producer import Producer, Reason, State
from penstock.shared.local.embedded import EmbeddedRedis

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    factory = WorkerFactory(server.url, tmp_path_factory.mktemp("worker"))
    factory.engine("only", engine__max_sequences=8)
    yield server.url
    factory.close()


Run = Callable[..., str]


@pytest.fixture
def run(url: str, tmp_path: Path) -> Run:
    """Run a program as a user would, from a directory of the user's own; its standard output."""

    def run(program: Path, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(program), *arguments],
            cwd=tmp_path,
            env={**os.environ, "REDIS_URL": url},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout

    return run


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_python_of_the_page(page: str, run: Run, tmp_path: Path) -> None:
    (block,) = python_blocks(ROOT / page)
    program = tmp_path / "block.py"
    program.write_text(block)
    text, last = run(program).rstrip("\n").rsplit("\n", 1)
    assert text.strip()
    assert re.match(r"completed \((length|stop)\)", last)


def test_every_example_is_run_here_or_with_the_ingress() -> None:
    tested = {"stream.py", "lanes.py", "resume.py", "blocking.py", "by_hand.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested | {"python_plain.py"}


def test_stream(run: Run) -> None:
    printed = run(EXAMPLES / "stream.py", "A string literal", "16")
    assert printed.startswith("A string literal")
    assert re.search(r"\nEnd\(n=\d+, reason=<Reason.(LENGTH|STOP)", printed)


def test_lanes(run: Run) -> None:
    printed = run(EXAMPLES / "lanes.py", "40")
    place = re.search(r"last of 41, the critical request ended as number (\d+)", printed)
    assert place, printed
    # Eight run at a time, and claimed work is not taken back: two turns of them may go before.
    assert int(place[1]) <= 17


def test_resume(run: Run) -> None:
    printed = run(EXAMPLES / "resume.py")
    killed = re.search(r"the reader was killed after (\d+) tokens", printed)
    assert killed, printed
    assert 20 <= int(killed[1]) < 400, "it was killed in the middle"
    assert "the next one read up to token 400" in printed
    assert "the whole text: True" in printed


def test_blocking(run: Run) -> None:
    printed = run(EXAMPLES / "blocking.py")
    assert "End(n=" in printed
    assert printed.count("->") >= 3


def test_by_hand(run: Run) -> None:
    printed = run(EXAMPLES / "by_hand.py")
    assert re.search(r"\ncompleted \((length|stop)\) after \d+ tokens", printed)
    assert "'output_tokens'" in printed


async def test_users_of_the_protocol_page(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> None:
    """The ACL rules let a worker serve and a client submit, stream and cancel, and no more."""
    server = start_redis()
    page = (ROOT / "docs/protocol.md").read_text("utf-8")
    rules = re.findall(r"^ACL SETUSER .*$", page, re.MULTILINE)
    with redis.Redis.from_url(server.url) as admin:
        for rule in rules:
            admin.execute_command(*rule.split())
        addresses = {}
        for user in ("producer", "worker"):
            assert any(rule.startswith(f"ACL SETUSER {user} ") for rule in rules)
            addresses[user] = f"redis://{user}:secret@127.0.0.1:{server.url.rpartition(':')[2]}"
            with redis.Redis.from_url(addresses[user]) as limited:
                for command in (["FLUSHALL"], ["GET", "other"], ["KEYS", "*"], ["CONFIG", "GET"]):
                    with pytest.raises(redis.ResponseError):
                        limited.execute_command(*command)
        factory = WorkerFactory(addresses["worker"], tmp_path)
        try:
            worker = factory.engine("limited", worker__lease_ms=300)
            async with Producer(addresses["producer"]) as producer:
                stream = await producer.generate("The list type", max_tokens=8, ignore_eos=True)
                result = await asyncio.wait_for(stream.collect(), 30)
                assert (result.reason, result.end.n) == (Reason.LENGTH, 8)
                late = await producer.submit("The", max_tokens=1900, ignore_eos=True)
                async for _ in producer.stream(late.id, timeout=30):
                    break
                assert (await producer.cancel(late.id)).state is State.CANCELLED
            assert worker.terminate() == 0
            log = worker.log.read_text()
            assert "refused" not in log
            assert "NOPERM" not in log
            denied = [entry for entry in admin.acl_log() if b"client-info" not in entry]
            reasons = {(e["username"], e["object"]) for e in denied}
        finally:
            factory.close()
    # What the test itself tried, and what redis-py says about itself when it connects.
    # Redis 6.2 logs a denied subcommand under its command's name alone.
    tried = {"flushall", "get", "keys", "config", "config|get"}
    assert {name.lower() for _, name in reasons} <= tried | {"client|setinfo", "client"}

"""The ingress's examples, run as they are, against a real worker; also as a confined tenant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from ingress.test_acl import Server
from waiting import wait_until
from workers import WorkerFactory

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.synthetic import synthetic_tokens

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KEYS = Keys("demo")
PROMPT = 'Say "hi" in a \\ wörld'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a worker and the users of the ACL templates."""
    with EmbeddedRedis(password="") as embedded:
        factory = WorkerFactory(embedded.url, tmp_path_factory.mktemp("worker"))
        factory.engine("w", model__path="synthetic", model__synthetic_step_ms=1)
        server = Server(embedded.url)
        yield server
        server.close()
        factory.close()


@pytest.fixture(params=["trusted", "confined"])
def environment(request: pytest.FixtureRequest, served: Server) -> dict[str, str]:
    if request.param == "trusted":
        return {"REDIS_URL": served.url}
    return {"REDIS_URL": served.url_of("acme", "acme-pw"), "TENANT": "acme"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check(served: Server, done: subprocess.CompletedProcess[str], tenant: str) -> None:
    """The text is the one that the request's log holds, and the request is the one asked for."""
    assert done.returncode == 0, done.stderr
    (record,) = served.admin.keys(KEYS.request("*"))
    id = record.removeprefix(KEYS.request(""))
    expected = "".join(map(chr, synthetic_tokens(_seed(id), [ord(c) for c in PROMPT], 64)))
    assert done.stdout == expected + "\n"
    assert served.admin.hmget(record, "lane", "tenant", "state") == [
        "critical",
        tenant,
        "completed",
    ]
    assert id.startswith(f"{tenant}.") or tenant == "default"
    served.admin.delete(record, KEYS.log(id))


def _seed(id: str) -> int:
    from penstock.shared.protocol.request import Request

    return Request(id=id, prompt="x").seed


def test_redis_cli(served: Server, environment: dict[str, str]) -> None:
    done = run(str(EXAMPLES / "redis_cli.sh"), PROMPT, **environment)
    check(served, done, environment.get("TENANT", "default"))


def test_redis_cli_shows_a_refusal(served: Server) -> None:
    done = run(str(EXAMPLES / "redis_cli.sh"), "", REDIS_URL=served.url)
    assert done.returncode == 1
    assert '"reason":"invalid"' in done.stderr


def test_python_without_penstock(served: Server, environment: dict[str, str]) -> None:
    script = str(EXAMPLES / "python_plain.py")
    assert "penstock." not in Path(script).read_text("utf-8").partition('"""\n\n')[2]
    done = run(sys.executable, script, PROMPT, **environment)
    check(served, done, environment.get("TENANT", "default"))
    assert done.stderr == "completed (length) \n"


@pytest.fixture(scope="module")
def node_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with its dependencies, installed exactly as the lock file names them."""
    copy = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLES / "node", copy, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"],
        cwd=copy, check=True, timeout=110, capture_output=True,
    )  # fmt: skip
    return copy


needs_npm = pytest.mark.skipif(
    shutil.which("npm") is None, reason="Node.js is not installed: apt-get install nodejs npm"
)


@needs_npm
def test_node(served: Server, environment: dict[str, str], node_example: Path) -> None:
    done = run("node", str(node_example / "generate.mjs"), PROMPT, **environment)
    check(served, done, environment.get("TENANT", "default"))
    assert done.stderr == "completed (length) \n"


@needs_npm
def test_node_shows_a_refusal(served: Server, node_example: Path) -> None:
    done = run("node", str(node_example / "generate.mjs"), "", REDIS_URL=served.url)
    assert done.returncode == 1
    assert done.stderr.startswith("failed (invalid) prompt: ")


def test_the_lock_file_names_versions_and_no_servers() -> None:
    lock = (EXAMPLES / "node" / "package-lock.json").read_text("utf-8")
    assert '"integrity": "sha512-' in lock
    assert "://" not in lock
    assert "resolved" not in lock


def test_an_example_waits_for_a_server_that_comes_back(tmp_path: Path) -> None:
    """The Python one repeats its XADD; the id makes it one request."""
    with EmbeddedRedis(password="") as embedded, redis.Redis.from_url(embedded.url) as admin:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "python_plain.py"), "Hi"],
            env={"PATH": os.environ["PATH"], "REDIS_URL": embedded.url},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            wait_until(
                lambda: admin.exists(KEYS.ingress()) or process.poll() is not None, "it has asked"
            )
            assert process.poll() is None
            admin.client_kill_filter(_type="normal", skipme=True)
            factory = WorkerFactory(embedded.url, tmp_path)
            factory.engine("w", model__path="synthetic", model__synthetic_step_ms=0)
            out, _ = process.communicate(timeout=60)
            factory.close()
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert len(out.strip()) == 64

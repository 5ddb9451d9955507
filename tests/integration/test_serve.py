"""``penstock serve``: everything by one command, drained in order, and nothing lost in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import self_signed
from waiting import wait_until

from penstock.producer import Producer, State
from penstock.producer.cli import main
from penstock.producer.cli.serve.data_directory import default_directory, owned
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.children import spawn_bound
from penstock.shared.synthetic import synthetic_tokens

STEP_MS = 10


class Serving:
    """The command with a worker that needs no model; its Redis keeps its data in a directory."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        wait_until(lambda: "Ask it" in self.text or process.poll() is not None, "ready", 120)
        assert process.poll() is None, self.text

    @property
    def text(self) -> str:
        return self._log.read_text()

    @property
    def base_url(self) -> str:
        return re.search(r"curl (\S+)/chat/completions", self.text)[1]  # type: ignore[index]

    @property
    def redis_url(self) -> str:
        return re.search(r"REDIS_URL=(\S+);", self.text)[1]  # type: ignore[index]


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Serving]:
    log = folder / "serve.log"
    environment = {**os.environ, "PENSTOCK_MODEL__SYNTHETIC_STEP_MS": str(STEP_MS)}
    environment["PENSTOCK_WORKER__METRICS_PORT"] = "0"  # a worker of the machine's may have its own
    environment.pop("REDIS_URL", None)
    command = [sys.executable, "-m", "penstock.producer.cli", "serve", "--model", "synthetic"]
    with log.open("wb") as out:
        process = spawn_bound(
            [*command, "--port", "0", "--data", str(folder / "data"), *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            new_session=True,
        )
    try:
        yield Serving(process, log)
    finally:
        process.kill()
        process.wait()


def ask(served: Serving, max_tokens: int | None, *, stream: bool) -> urllib.request.Request:
    """A request for text; without a number of tokens one of chat, for as many as is set."""
    body = {"model": "synthetic", "max_tokens": max_tokens, "stream": stream}
    if max_tokens is None:
        endpoint, asked = "chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
    else:
        endpoint, asked = "completions", {"prompt": "hello"}
    return urllib.request.Request(
        f"{served.base_url}/{endpoint}",
        json.dumps({**body, **asked}).encode(),
        {"content-type": "application/json"},
    )


def gateway_processes(pid: int) -> int:
    """How many children of a process, and of theirs, serve HTTP beside others on one port."""
    found = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one ended meanwhile
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                found += b"penstock.producer.gateway.serving" in command
                found += gateway_processes(child)
    return found


async def test_it_serves_drains_and_goes_on_where_it_was(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[gateway]\ndefault_max_tokens = 3\n")
    flags = ("--workers", "2", "--processes", "2", "--config", str(config))
    with serving(tmp_path, *flags) as served:
        assert "2 workers" in served.text
        assert "authorization" not in served.text
        wait_until(lambda: gateway_processes(served.process.pid) == 2, "two processes", 60)
        with await asyncio.to_thread(
            urllib.request.urlopen, ask(served, None, stream=False), timeout=60
        ) as reply:
            assert len(json.load(reply)["choices"][0]["message"]["content"]) == 3
        with await asyncio.to_thread(
            urllib.request.urlopen, ask(served, 4, stream=False), timeout=60
        ) as reply:
            assert len(json.load(reply)["choices"][0]["text"]) == 4
        async with Producer(served.redis_url, model="synthetic") as producer:
            long = await producer.submit([1, 2, 3], id="long", max_tokens=400, seed=7)
            async with producer.stream(long.id, timeout=60) as stream:
                async for _ in stream:
                    break
        reply = await asyncio.to_thread(
            urllib.request.urlopen, ask(served, 60, stream=True), timeout=60
        )
        with reply:
            first = reply.readline()
            served.process.send_signal(signal.SIGINT)
            rest = (await asyncio.to_thread(reply.read)).decode()
        assert first.startswith(b"id:")
        assert rest.rstrip().endswith("data: [DONE]"), "an answer under way ends first"
        assert await asyncio.to_thread(served.process.wait, 60) == 0
        assert "draining" in served.text
        assert "Traceback" not in served.text
    with serving(tmp_path) as served:
        async with Producer(served.redis_url, model="synthetic") as producer:
            result = await producer.result("long", timeout=60)
            assert result.state is State.COMPLETED
            assert result.token_ids == synthetic_tokens(7, [1, 2, 3], 400)
            assert result.usage is not None
            assert result.usage.attempts == 2
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.process.wait, 60) == 0


@pytest.mark.parametrize("clients", ["all", "with a certificate"])
def test_a_gateway_with_tls_and_keys_is_ready(
    tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str], clients: str
) -> None:
    assert main(["keys", "create", "--tenant", "acme", "--redis", redis_url]) == 0
    secret = capsys.readouterr().out.split()[0]
    certificate, key = self_signed(tmp_path)
    lines = ["[gateway]", f'tls_certificate = "{certificate}"', f'tls_key = "{key}"']
    if clients != "all":
        lines.append(f'tls_client_ca = "{certificate}"')
    config = tmp_path / "settings.toml"
    config.write_text("\n".join(lines))
    with serving(tmp_path, "--config", str(config), "--redis", redis_url) as served:
        assert served.base_url.startswith("https://")
        assert "-H 'authorization: Bearer YOUR_API_KEY'" in served.text
        if clients == "all":
            request = ask(served, 4, stream=False)
            request.add_header("authorization", f"Bearer {secret}")
            trust = ssl.create_default_context(cafile=str(certificate))
            with urllib.request.urlopen(request, timeout=60, context=trust) as reply:
                assert len(json.load(reply)["choices"][0]["text"]) == 4


def test_a_worker_that_refuses_ends_all(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.producer.cli", "serve", "--model", str(tmp_path / "none"),
         "--port", "0", "--data", str(tmp_path / "data")],
        capture_output=True, text=True, timeout=60, check=False,
        env={key: value for key, value in os.environ.items() if key != "REDIS_URL"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the worker ended with exit code 2: ")


def test_one_server_a_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "penstock" / "redis"
    with (
        owned(default_directory()) as mine,
        pytest.raises(ConfigurationError, match="in use by another penstock serve"),
        owned(mine),
    ):
        pass
    with owned(mine):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigurationError, match="give another with --data"),
        owned(tmp_path / "file" / "below"),
    ):
        pass

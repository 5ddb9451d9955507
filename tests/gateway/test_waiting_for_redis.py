"""A gateway that is started before Redis waits for it; one that Redis refuses ends."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from gateway.rig import GatewayProcess
from waiting import wait_until

from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import find_server

WAITS = "the gateway waits for it"
CAME = "Redis answers; the gateway serves"
BODY = {"model": "nobody", "prompt": "abc"}


@contextlib.contextmanager
def redis_server(port: int, folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    given = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *options]
    process = spawn_bound([find_server().path, *given], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


@contextlib.contextmanager
def early(redis_port: int, folder: Path, **settings: object) -> Iterator[GatewayProcess]:
    """A gateway that listens, and does not find Redis."""
    gateway = GatewayProcess(
        f"redis://127.0.0.1:{redis_port}",
        folder / "gateway.log",
        ready=False,
        gateway__port=free_port(),
        **settings,
    )
    try:
        yield gateway
    finally:
        gateway.kill()


def health(gateway: GatewayProcess) -> tuple[int, dict[str, object]]:
    """Status and body; status 0 where nothing listens yet."""
    try:
        answer = httpx.get(f"{gateway.url}/health", timeout=60)
    except httpx.TransportError:
        return 0, {}
    return answer.status_code, answer.json()


@pytest.mark.parametrize("processes", [1, 2])
def test_redis_comes_after_the_gateway(processes: int, tmp_path: Path) -> None:
    port = free_port()
    with early(port, tmp_path, gateway__processes=processes) as gateway:
        wait_until(lambda: health(gateway)[0] == 503, "a gateway that waits")
        reason = "it cannot be reached"
        assert health(gateway)[1] == {"status": "redis unavailable", "reason": reason}
        refused = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=60)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_unavailable"
        assert refused.headers["retry-after"] == "2"
        assert refused.headers["x-request-id"].startswith("req-")
        with redis_server(port, tmp_path):
            wait_until(lambda: health(gateway)[0] == 200, "a gateway that serves")
            unknown = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=60)
            assert unknown.json()["error"]["code"] == "model_not_found"
            log = gateway.log.read_text()
            assert log.count(WAITS) == log.count(CAME) == 1
            assert f"cannot reach Redis at redis://127.0.0.1:{port}" in log
            assert gateway.terminate() == 0


def test_a_server_that_loads_its_data_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    # While it loads, a server answers after every 2 MiB; only Redis 7 can be told to do so sooner.
    # Here that is after every 32 keys, or 0.6 s, and the whole takes 12 s unless it can be hurried.
    plain = ("--rdbcompression", "no")
    with redis_server(port, tmp_path, *plain), redis.Redis(port=port) as client:
        wait_until(lambda: answers(client), "Redis is up")
        for index in range(600):
            client.set(f"key{index}", bytes(65536))
        client.save()
    with early(port, tmp_path) as gateway:
        wait_until(lambda: health(gateway)[0] == 503, "a gateway that waits")
        with (
            redis_server(port, tmp_path, *plain, "--key-load-delay", "20000"),
            redis.Redis(port=port) as client,
        ):
            wait_until(lambda: "loading" in str(health(gateway)[1].get("reason")), "the reason")
            with contextlib.suppress(redis.ResponseError):  # Redis 6.2 changes nothing meanwhile
                client.config_set("key-load-delay", 0)
            wait_until(lambda: health(gateway)[0] == 200, "a gateway that serves")


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize(
    ("host", "option", "says"),
    [
        ("127.0.0.1", ("--requirepass", "secret"), "refuses access"),
        ("0.0.0.0", (), "there are no API keys"),
    ],
)
def test_what_it_cannot_use_ends_it_then(
    host: str, option: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    port = free_port()
    with early(port, tmp_path, gateway__host=host) as gateway:
        wait_until(lambda: health(gateway)[0] == 503, "a gateway that waits")
        with redis_server(port, tmp_path, *option):
            assert gateway.process.wait(60) == 2
    assert says in gateway.log.read_text()
    assert "Traceback" not in gateway.log.read_text()


def test_a_signal_ends_the_waiting(tmp_path: Path) -> None:
    with early(free_port(), tmp_path) as gateway:
        wait_until(lambda: health(gateway)[0] == 503, "a gateway that waits")
        assert gateway.terminate() == 0
    assert CAME not in gateway.log.read_text()


def test_what_is_no_redis_ends_it_at_once(tmp_path: Path) -> None:
    with early(free_port(), tmp_path) as waiting:
        wait_until(lambda: health(waiting)[0] == 503, "an HTTP server")
        other = tmp_path / "other"
        other.mkdir()
        with early(int(waiting.port), other) as gateway:
            assert gateway.process.wait(60) == 2
    assert "does not speak Redis" in gateway.log.read_text()
    assert WAITS not in gateway.log.read_text()

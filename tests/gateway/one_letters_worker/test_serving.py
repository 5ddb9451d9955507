"""How a gateway serves: TLS, CORS, several processes, keep-alives, Redis away."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from certificates import self_signed
from gateway.rig import Event, GatewayProcess, events
from waiting import wait_until

from penstock.shared.local.embedded import EmbeddedRedis

ORIGIN = "https://app.example"
BODY = {"model": "letters", "prompt": "abc", "max_tokens": 4}


@pytest.fixture(scope="module")
def certificate(folder: Path) -> tuple[Path, Path]:
    return self_signed(folder)


@pytest.fixture(scope="module")
def guarded(
    server: EmbeddedRedis, folder: Path, certificate: tuple[Path, Path]
) -> Iterator[GatewayProcess]:
    """Two processes behind one port, with TLS, CORS and short silences."""
    process = GatewayProcess(
        server.url,
        folder / "guarded.log",
        gateway__processes=2,
        gateway__tls_certificate=certificate[0],
        gateway__tls_key=certificate[1],
        gateway__cors_origins=ORIGIN,
        gateway__keep_alive_s=0.4,
        gateway__extra_models="nobody",
    )
    yield process
    process.kill()


@pytest.fixture(scope="module")
def trust(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


def children(gateway: GatewayProcess) -> set[int]:
    pid = gateway.process.pid
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return {int(word) for word in listed.split()}


def is_up(gateway: GatewayProcess, trust: ssl.SSLContext) -> bool:
    try:
        return httpx.get(f"{gateway.url}/health", verify=trust, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def test_tls_and_cors(guarded: GatewayProcess, trust: ssl.SSLContext) -> None:
    assert guarded.url.startswith("https://")
    url = f"{guarded.url}/v1/completions"
    wait_until(lambda: is_up(guarded, trust), "an answer")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        httpx.post(url, json=BODY, timeout=60)
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    allowed = httpx.options(url, headers=asked, verify=trust, timeout=60)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    for body, status in ((BODY, 200), ({**BODY, "max_tokens": 0}, 400), ({}, 400)):
        answer = httpx.post(url, json=body, headers={"origin": ORIGIN}, verify=trust, timeout=60)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
    other = httpx.options(
        url, headers={**asked, "origin": "https://evil.example"}, verify=trust, timeout=60
    )
    assert "access-control-allow-origin" not in other.headers
    with httpx.stream(
        "POST", url, json={**BODY, "stream": True}, verify=trust, timeout=60
    ) as response:
        assert "".join(event.text for event in events(response)).isalpha()


def test_a_head_comes_with_its_body_in_one_piece(gateway: GatewayProcess) -> None:
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
    asked = (
        (head + b"content-length: %d\r\n\r\n" % len(body) + body, True, b"\r\n0\r\n\r\n"),
        (b"GET /v1/nothing HTTP/1.1\r\nhost: [::1]\r\n\r\n", True, b"}"),
        # A head without a body; were it kept, the connection would stand still.
        (b"HEAD /v1/models HTTP/1.1\r\nhost: [::1]\r\n\r\n", False, b"\r\n\r\n"),
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        for request, has_body, at_end in asked * 2:
            connection.sendall(request)
            first = found = connection.recv(1 << 20)
            while not found.endswith(at_end):
                found += connection.recv(1 << 20)
            head, _, body = first.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 ")
            assert bool(body) == has_body


def test_a_comment_comes_in_every_silence(guarded: GatewayProcess, trust: ssl.SSLContext) -> None:
    wait_until(lambda: is_up(guarded, trust), "an answer")
    body = {**BODY, "model": "nobody", "stream": True}
    url = f"{guarded.url}/v1/completions"
    with httpx.stream("POST", url, json=body, verify=trust, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert [next(lines) for _ in range(6)] == [": keep-alive", ""] * 3


def test_a_process_that_dies_is_replaced(guarded: GatewayProcess, trust: ssl.SSLContext) -> None:
    wait_until(lambda: len(children(guarded)) == 2, "two processes")
    wait_until(lambda: is_up(guarded, trust), "an answer")
    before = children(guarded)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(children(guarded) - {victim}) == 2, "another process")
    assert len(children(guarded) & before) == 1
    wait_until(lambda: is_up(guarded, trust), "an answer")


def test_a_stream_goes_on_after_the_processes_that_sent_it(
    guarded: GatewayProcess, trust: ssl.SSLContext
) -> None:
    wait_until(lambda: len(children(guarded)) == 2, "two processes")
    wait_until(lambda: is_up(guarded, trust), "an answer")
    url = f"{guarded.url}/v1/completions"
    body = {**BODY, "prompt": "goes on", "max_tokens": 600, "seed": 5}
    headers = {"idempotency-key": "goes on"}
    streamed = {**body, "stream": True}
    with httpx.stream(
        "POST", url, json=streamed, headers=headers, verify=trust, timeout=60
    ) as response:
        first = next(events(response))
        for pid in children(guarded):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_up(guarded, trust), "an answer")
    headers["last-event-id"] = str(first.id)
    with httpx.stream(
        "POST", url, json=streamed, headers=headers, verify=trust, timeout=60
    ) as response:
        rest = list(events(response))
    whole = httpx.post(url, json=body, verify=trust, timeout=60).json()["choices"][0]["text"]
    assert rest[-1].data == "[DONE]"
    assert first.text + "".join(event.text for event in rest) == whole


def test_streams_wait_for_redis_and_new_requests_are_told(
    gateway: GatewayProcess, server: EmbeddedRedis, folder: Path
) -> None:
    impatient = GatewayProcess(
        server.url, folder / "impatient.log", redis__socket_timeout_s=0.3, gateway__outage_s=0.5
    )
    found: list[Event] = []

    def read() -> None:
        body = {**BODY, "prompt": "outage", "max_tokens": 800, "stream": True}
        with httpx.stream(
            "POST", f"{gateway.url}/v1/completions", json=body, timeout=60
        ) as response:
            found.extend(events(response))

    reader = threading.Thread(target=read)
    with redis.Redis.from_url(server.url) as client:

        def serves() -> bool:
            url = f"{impatient.url}/v1/completions"
            return httpx.post(url, json=BODY, timeout=60).status_code == 200

        wait_until(serves, "an answer")
        reader.start()
        wait_until(lambda: client.zcard("ps:{letters.0}:deadlines"), "the request")
        client.execute_command("CLIENT", "PAUSE", 4000, "ALL")
    refused = httpx.post(f"{impatient.url}/v1/completions", json=BODY, timeout=60)
    impatient.kill()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_unavailable"
    assert int(refused.headers["retry-after"]) >= 1
    reader.join(60)
    assert found[-1].data == "[DONE]"
    assert len("".join(event.text for event in found)) == 800

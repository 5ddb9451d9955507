"""What a gateway's log says of requests that came to nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
from gateway.rig import GatewayProcess, events
from waiting import wait_until

from penstock.shared.local.embedded import EmbeddedRedis

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"


def status_of(gateway: GatewayProcess, length: int) -> bytes:
    """How a request is answered whose body never comes."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % length)
        return connection.recv(1 << 16).split()[1]


def line_of(gateway: GatewayProcess, end: str) -> str:
    """The line of the log that ends so."""
    lines: list[str] = []

    def is_there() -> bool:
        lines[:] = [x for x in gateway.log.read_text().splitlines() if x.endswith(end)]
        return bool(lines)

    wait_until(is_there, f"the line {end}")
    (line,) = lines
    return line


def test_a_client_that_leaves_is_in_the_log(
    synthetic_worker: None, gateway: GatewayProcess
) -> None:
    model = f"{gateway.url}/v1/models/letters"
    wait_until(lambda: httpx.get(model, timeout=60).status_code == 200, "the model")
    body = {"model": "letters", "prompt": "abc", "max_tokens": 60_000, "stream": True}
    url = f"{gateway.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        next(events(response))
    name = response.headers["x-request-id"]
    assert " INFO penstock.gateway.requests: " in line_of(
        gateway, f"POST /v1/completions 499 {name}"
    )


def test_what_is_refused_is_in_the_log(gateway: GatewayProcess) -> None:
    answer = httpx.get(f"{gateway.url}/no%0Asuch", params={"secret": "1"}, timeout=60)
    line_of(gateway, rf"GET /no\nsuch 404 {answer.headers['x-request-id']}")
    assert "secret" not in gateway.log.read_text()
    assert status_of(gateway, 10**9) == b"413"
    wait_until(lambda: "POST /v1/completions 413 req-" in gateway.log.read_text(), "the line")


def test_a_body_that_does_not_come_is_in_the_log(server: EmbeddedRedis, folder: Path) -> None:
    hasty = GatewayProcess(server.url, folder / "hasty.log", gateway__body_timeout_s=0.5)

    def is_logged() -> bool:
        assert status_of(hasty, 10) == b"408"
        return "POST /v1/completions 408 req-" in hasty.log.read_text()

    try:
        wait_until(is_logged, "the line")
    finally:
        hasty.kill()

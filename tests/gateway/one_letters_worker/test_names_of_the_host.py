"""Without API keys a web page whose name resolves to this machine (DNS rebinding) gets nothing."""

from __future__ import annotations

import httpx
import pytest
from gateway.rig import GatewayProcess

BODY = {"model": "letters", "prompt": "abc", "max_tokens": 1}


def ask(gateway: GatewayProcess, host: str, method: str, path: str) -> httpx.Response:
    body = BODY if method == "POST" else None
    url = f"{gateway.url}{path}"
    return httpx.request(method, url, json=body, headers={"host": host}, timeout=60)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8000"],
)
def test_names_of_this_machine_are_served(gateway: GatewayProcess, host: str) -> None:
    assert ask(gateway, host, "GET", "/v1/models").status_code == 200


@pytest.mark.parametrize(
    "host",
    ["rebound.example", "rebound.example:8000", "127.0.0.1.example", "localhost.example",
     "10.0.0.1", "[::2]:8000", "[::1].example", "localhost@example", ""],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
        ("GET", "/v1/usage"), ("GET", "/v1/streams/x"), ("GET", "/v1/responses/x"),
        ("GET", "/v1/files"), ("GET", "/v1/batches"), ("DELETE", "/v1/streams/x"),
    ],
)  # fmt: skip
def test_other_names_are_refused(
    gateway: GatewayProcess, host: str, method: str, path: str
) -> None:
    answer = ask(gateway, host, method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert answer.headers["x-should-retry"] == "false"


def test_what_needs_no_key_answers_to_any_name(gateway: GatewayProcess) -> None:
    for path in ("/health", "/metrics", "/openapi.json"):
        assert ask(gateway, "monitor.example", "GET", path).status_code == 200

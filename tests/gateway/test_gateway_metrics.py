"""What ``/metrics`` says of streams: of those that are open, and of their first tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway.rig import GatewayProcess, events
from waiting import wait_until

from penstock.shared.local.embedded import EmbeddedRedis

pytestmark = pytest.mark.usefixtures("synthetic_worker")

BODY = {"model": "letters", "prompt": "abc", "max_tokens": 4, "stream": True}


@pytest.fixture(scope="module")
def pair(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """Two processes with short silences; the model ``nobody`` has no worker."""
    process = GatewayProcess(
        server.url,
        folder / "pair.log",
        gateway__processes=2,
        gateway__keep_alive_s=0.4,
        gateway__extra_models="nobody",
    )
    wait_until(lambda: serves(process), "the model")
    yield process
    process.kill()


def serves(gateway: GatewayProcess) -> bool:
    try:
        page = httpx.get(f"{gateway.url}/v1/models/letters", timeout=60)
    except httpx.HTTPError:  # no process listens yet, or one was killed just now
        return False
    return page.status_code == 200


def figure(gateway: GatewayProcess, name: str) -> float:
    """A figure; 0 before anything was counted."""
    page = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    start = f"penstock_gateway_{name} "
    return sum(float(x[len(start) :]) for x in page.splitlines() if x.startswith(start))


def test_the_first_token_is_no_comment_and_no_replay(pair: GatewayProcess) -> None:
    url, name = f"{pair.url}/v1/completions", "time_to_first_token_seconds_count"
    before = figure(pair, name)
    with httpx.stream("POST", url, json={**BODY, "model": "nobody"}, timeout=60) as response:
        lines = response.iter_lines()  # whose end would be that of the stream
        assert next(lines) == ": keep-alive"
        assert figure(pair, name) == before
    headers = {"idempotency-key": "once"}
    for _ in range(2):
        with httpx.stream("POST", url, json=BODY, headers=headers, timeout=60) as response:
            assert list(events(response))[-1].data == "[DONE]"
    replayed = httpx.get(f"{pair.url}/v1/streams/{response.headers['x-request-id']}", timeout=60)
    assert replayed.text.endswith("data: [DONE]\n\n")
    assert figure(pair, name) == before + 1


def test_the_streams_of_a_process_that_died_are_not_open(pair: GatewayProcess) -> None:
    url, pid = f"{pair.url}/v1/completions", pair.process.pid
    wait_until(lambda: figure(pair, "open_streams") == 0, "no open stream")
    with httpx.stream("POST", url, json={**BODY, "model": "nobody"}, timeout=60) as response:
        lines = response.iter_lines()  # whose end would be that of the stream
        assert next(lines) == ": keep-alive"
        assert figure(pair, "open_streams") == 1
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: serves(pair), "an answer")
    wait_until(lambda: figure(pair, "open_streams") == 0, "that stream counts no more")

"""What clients of several requests hear when Redis goes away under them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import redis
from gateway.rig import GatewayProcess
from waiting import wait_until

from penstock.shared.local.embedded import EmbeddedRedis


def test_several_prompts_get_the_error_that_one_gets(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> None:
    server = start_redis(password="")
    gateway = GatewayProcess(
        server.url,
        tmp_path / "gateway.log",
        gateway__extra_models="nobody",
        gateway__outage_s=0.5,
    )
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": "nobody", "prompt": ["a", "b"]}
        answers.append(httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    with redis.Redis.from_url(server.url) as client:
        wait_until(lambda: client.zcard("ps:{nobody.0}:deadlines") == 2, "both requests")
    server.stop()
    asking.join(60)
    (answer,) = answers
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "queue_unavailable"
    line = f"POST /v1/completions 503 {answer.headers['x-request-id']}"
    wait_until(lambda: line in gateway.log.read_text(), "the log's line")
    gateway.kill()

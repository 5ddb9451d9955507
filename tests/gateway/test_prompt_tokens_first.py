"""Streams whose prompt a worker must tokenize first: comments meanwhile, errors, a client that
leaves, a gateway that ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import redis.asyncio
from delivery.fleet import Shard
from gateway.rig import GatewayProcess
from waiting import wait_until
from workers import WorkerFactory

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis

COMMENT = [": keep-alive", ""]
CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
FIRST: list[dict[str, Any]] = [
    CONTINUOUS,
    {"stream": True, "echo": True, "logprobs": 1},
]


def start(
    server: EmbeddedRedis, folder: Path, name: str, *, keep_alive_s: float = 0.4
) -> GatewayProcess:
    return GatewayProcess(
        server.url,
        folder / f"{name}.log",
        gateway__keep_alive_s=keep_alive_s,
        gateway__extra_models="nobody,late,played",
        gateway__drain_timeout_s=0.1,
    )


@pytest.fixture
def quiet(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """Whatever takes a while has an answer before the first comment."""
    process = start(server, folder, "quiet", keep_alive_s=60)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def patient(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """Its streams are never silent for long, and wait for workers."""
    process = start(server, folder, "patient")
    yield process
    process.kill()


def stream(gateway: GatewayProcess, **fields: Any) -> Any:
    body = {"prompt": "abc", "max_tokens": 4, **fields}
    return httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("fields", FIRST, ids=["usage", "echo"])
def test_comments_come_until_a_worker_does_and_a_client_may_leave(
    patient: GatewayProcess, server: EmbeddedRedis, fields: dict[str, Any]
) -> None:
    with redis.Redis.from_url(server.url) as client:
        deadlines = "ps:{nobody.0}:deadlines"
        with stream(patient, model="nobody", **fields) as response:
            assert response.status_code == 200
            assert response.headers["x-request-id"].startswith("req-")
            lines = response.iter_lines()
            assert [next(lines) for _ in range(6)] == 3 * COMMENT
            assert client.zcard(deadlines) == 1
        wait_until(lambda: client.zcard(deadlines) == 0, "the end of the request")
    name = response.headers["x-request-id"]
    wait_until(lambda: f" 499 {name}" in patient.log.read_text(), "the log's line")


def test_a_gateway_that_ends_says_so(server: EmbeddedRedis, folder: Path) -> None:
    gateway = start(server, folder, "ending")
    with stream(gateway, model="nobody", **CONTINUOUS) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(2)] == COMMENT
        gateway.process.terminate()
        *_, last = [line for line in lines if line.startswith("data: ")]
    assert json.loads(last[6:])["error"]["code"] == "gateway_shutdown"
    assert gateway.process.wait(60) == 0


def test_the_answer_follows_the_comments(patient: GatewayProcess, fleet: WorkerFactory) -> None:
    with (
        stream(patient, model="late", **CONTINUOUS) as response,
        stream(patient, model="late", **CONTINUOUS, prompt="a" * 70_000) as refused,
    ):
        lines, others = response.iter_lines(), refused.iter_lines()
        assert [next(lines) for _ in range(2)] == [next(others) for _ in range(2)] == COMMENT
        fleet.supervised("late", "--model", "synthetic", "--name", "late")
        data = [line[6:] for line in lines if line.startswith("data: ")]
        (error,) = [line[6:] for line in others if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    usages = [json.loads(line)["usage"] for line in data]
    assert usages[-1]["completion_tokens"] == 4
    assert {usage["prompt_tokens"] for usage in usages} == {3}
    assert json.loads(error)["error"]["code"] == "context_length_exceeded"


async def test_no_prompt_runs_before_all_are_tokenized(
    patient: GatewayProcess, server: EmbeddedRedis
) -> None:
    """A request that is submitted while others are tokenized would lose its reader meanwhile."""
    body = {"model": "played", "prompt": [[1], [2]], "echo": True, "max_tokens": 2}
    url = f"{patient.url}/v1/completions"
    async with (
        redis.asyncio.Redis.from_url(server.url) as client,
        httpx.AsyncClient(timeout=60) as http,
    ):
        worker = Shard(client, keys=Keys("played")).worker("w")
        asking = asyncio.create_task(http.post(url, json=body))
        for kind in ("tok-", "tok-", "cmpl-", "cmpl-"):
            claim = await worker.next_claim()
            assert claim.id.startswith(kind)
            await worker.send(worker.ending(claim, 0, 2))
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2


def test_errors_before_a_comment_have_their_own_status(
    quiet: GatewayProcess, synthetic_worker: None
) -> None:
    def is_served() -> bool:
        return "letters" in httpx.get(f"{quiet.url}/health", timeout=60).json()["models"]

    wait_until(is_served, "the worker")
    for fields, status, params in (
        ({"model": "unknown"}, 404, ("model", "model")),
        ({"model": "letters", "prompt": "a" * 70_000}, 400, ("prompt", "logprobs")),
    ):
        for kind, param in zip(FIRST, params, strict=True):
            with stream(quiet, **{**kind, **fields}) as response:
                answer = json.loads(response.read())
            assert response.status_code == status
            assert answer["error"]["param"] == param

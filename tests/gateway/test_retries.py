"""What an error says of another try; mostly the test plays the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from delivery.fleet import Shard
from gateway.rig import GatewayProcess
from redis.asyncio import Redis
from workers import WorkerFactory

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.states import Reason

BODY = {"model": "played", "prompt": "abc", "max_tokens": 20}


@pytest.fixture(scope="module")
def waiting(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "waiting.log", gateway__extra_models="played")
    yield process
    process.kill()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "retry_after"),
    [(Reason.QUEUE_TIMEOUT, "5"), (Reason.ENGINE_ERROR, None)],
)
async def test_a_key_whose_request_failed_is_not_to_be_tried_again(
    waiting: GatewayProcess,
    server: EmbeddedRedis,
    reason: Reason,
    retry_after: str | None,
    stream: bool,
) -> None:
    url, body = f"{waiting.url}/v1/completions", {**BODY, "stream": stream}
    keyed = {"idempotency-key": f"{reason} {stream}"}
    async with (
        Redis.from_url(server.url) as client,
        httpx.AsyncClient(timeout=60) as http,
    ):
        worker = Shard(client, keys=Keys("played")).worker("w")
        answers = []
        for headers in ({}, keyed):
            asking = asyncio.create_task(http.post(url, json=body, headers=headers))
            claim = await worker.next_claim()
            await worker.send(worker.ending(claim, 0, reason=reason))
            answers.append(await asking)
        answers.append(await http.post(url, json=body, headers=keyed))
        path = f"{waiting.url}/v1/streams/{claim.id}"
        answers.append(await http.get(path))
    fresh, *repeated = answers
    assert (fresh.headers.get("retry-after"), "x-should-retry" in fresh.headers) == (
        retry_after,
        False,
    )
    for answer in repeated:
        assert answer.json()["error"]["code"] == reason.value
        assert answer.status_code == fresh.status_code
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers


def test_a_full_queue_is_told_when_to_come_back(
    server: EmbeddedRedis, folder: Path, fleet: WorkerFactory
) -> None:
    small = GatewayProcess(
        server.url, folder / "small.log", queue__max_queued_requests=1, gateway__extra_models="late"
    )
    try:
        body = {"model": "late", "prompt": "abc", "max_tokens": 4}
        asked = {"model": "late", "input": "abc", "background": True}
        waits = httpx.post(f"{small.url}/v1/responses", json=asked, timeout=60).json()
        assert waits["status"] == "queued"
        refused = httpx.post(f"{small.url}/v1/completions", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 120

        seen: list[int] = []

        def make_room(response: httpx.Response) -> None:
            seen.append(response.status_code)
            if len(seen) == 1:
                fleet.supervised("late", "--model", "synthetic", "--name", "late")
                httpx.delete(f"{small.url}/v1/streams/{waits['id']}", timeout=60)

        http = httpx.Client(event_hooks={"response": [make_room]})
        with small.client(max_retries=2, http_client=http) as client:
            answer = client.completions.create(**body)
        assert len(answer.choices[0].text) == 4
        assert (seen[0], seen[-1]) == (429, 200)
    finally:
        small.kill()

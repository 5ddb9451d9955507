"""A background response has events before any worker has seen it; the test plays the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from delivery.fleet import Shard
from gateway.rig import Event, GatewayProcess, events
from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.states import Reason

BODY = {"model": "played", "input": "abc", "stream": True, "background": True}
OPENING = ["response.created", "response.queued"]


@pytest.fixture(scope="module")
def waiting(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway that sends no comments: what a silence brings would come too late."""
    settings = {"gateway__extra_models": "played", "gateway__keep_alive_s": 3600}
    process = GatewayProcess(server.url, folder / "waiting.log", **settings)
    yield process
    process.kill()


async def end_next(url: str, reason: Reason) -> None:
    async with Redis.from_url(url) as client:
        worker = Shard(client, keys=Keys("played")).worker("w")
        claim = await worker.next_claim()
        await worker.send(worker.ending(claim, 0, reason=reason))


def types(found: list[Event]) -> list[str]:
    return [event.data["type"] for event in found]


def test_it_opens_at_once_wherever_it_is_read(
    waiting: GatewayProcess, server: EmbeddedRedis
) -> None:
    url = f"{waiting.url}/v1/responses"
    headers = {"idempotency-key": "opens"}
    with httpx.stream("POST", url, json=BODY, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        live = events(response)
        first = [next(live), next(live)]
        assert types(first) == OPENING
        name = response.headers["x-request-id"]
        assert {event.data["response"]["id"] for event in first} == {name}
        assert {event.data["response"]["status"] for event in first} == {"queued"}
        reads: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("POST", url, {"json": BODY, "headers": headers}),
            ("GET", f"{url}/{name}?stream=true", {}),
            ("GET", f"{waiting.url}/v1/streams/{name}", {}),
        )
        for method, path, options in reads:
            with httpx.stream(method, path, timeout=60, **options) as again:
                other = events(again)
                assert [next(other), next(other)] == first
        asyncio.run(end_next(server.url, Reason.PROMPT_TOO_LONG))
        whole = first + list(live)
    assert types(whole) == [*OPENING, "response.in_progress", "response.failed"]
    assert [event.data["sequence_number"] for event in whole] == [0, 1, 2, 3]
    assert whole[-1].data["response"]["error"]["code"] == "invalid_prompt"
    for after in (None, 0, 1, 2):
        params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
        with httpx.stream("GET", f"{url}/{name}", params=params, timeout=60) as response:
            assert list(events(response)) == whole[0 if after is None else after + 1 :]


def test_a_client_that_waits_for_its_response_gets_the_status_of_a_refusal(
    waiting: GatewayProcess, server: EmbeddedRedis
) -> None:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as http:
            asking = asyncio.create_task(
                http.post(f"{waiting.url}/v1/responses", json={**BODY, "background": False})
            )
            await end_next(server.url, Reason.PROMPT_TOO_LONG)
            return await asking

    answer = asyncio.run(ask())
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_long_silence_opens_any_response(server: EmbeddedRedis, folder: Path) -> None:
    settings = {"gateway__extra_models": "played", "gateway__keep_alive_s": 0.2}
    quick = GatewayProcess(server.url, folder / "quick.log", **settings)
    body = {**BODY, "background": False}
    try:
        url = f"{quick.url}/v1/responses"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            found = events(response)
            assert next(found).data["type"] == "response.created"
            asyncio.run(end_next(server.url, Reason.PROMPT_TOO_LONG))
            (error,) = found
            assert error.data["type"] == "error"
            assert error.data["sequence_number"] == 0
    finally:
        quick.kill()

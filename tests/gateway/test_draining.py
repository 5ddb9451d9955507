"""What a gateway that ends says to its clients, and that they can go on as it says.

The test plays the worker, so that no answer ends before its gateway does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from delivery.fleet import FakeWorker, Shard, chunk
from gateway.rig import GatewayProcess
from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.chat.deltas import CONTENT, Delta
from penstock.shared.scripts.operations import Append, Claim

BODY: dict[str, Any] = {"model": "played", "prompt": "abc", "max_tokens": 20}
ASKED: dict[str, Any] = {"model": "played", "input": "abc", "stream": True}


@pytest.fixture
async def worker(server: EmbeddedRedis) -> AsyncIterator[FakeWorker]:
    async with Redis.from_url(server.url) as client:
        yield Shard(client, keys=Keys("played")).worker("w")


@pytest.fixture
def ending(server: EmbeddedRedis, tmp_path: Path) -> Iterator[GatewayProcess]:
    """The gateway that ends."""
    process = GatewayProcess(
        server.url,
        tmp_path / "ending.log",
        gateway__drain_timeout_s=0.1,
        gateway__extra_models="played",
    )
    yield process
    process.kill()


def content(worker: FakeWorker, claim: Claim, start: int, count: int) -> Append:
    """Tokens of a parsed answer, each with a delta."""
    deltas = tuple(Delta(CONTENT, f"{i}.", token=i) for i in range(count))
    packed = chunk(claim.id, start, count)._replace(deltas=deltas).pack()
    return worker.tokens(claim, start, count)._replace(chunk=packed)


def data_of(lines: list[str]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_a_response_goes_on_where_its_error_says(
    ending: GatewayProcess, gateway: GatewayProcess, worker: FakeWorker
) -> None:
    lines: list[str] = []
    async with httpx.AsyncClient(timeout=60) as http:
        async with http.stream("POST", f"{ending.url}/v1/responses", json=ASKED) as response:
            claim = await worker.next_claim()
            await worker.send(content(worker, claim, 0, 5))
            async for line in response.aiter_lines():
                lines.append(line)
                if '"delta":"4."' in line:
                    ending.process.terminate()
        *seen, error = data_of(lines)
        assert error["code"] == "gateway_shutdown"
        assert [event["sequence_number"] for event in seen] == list(range(9))
        await worker.send(content(worker, claim, 5, 2), worker.ending(claim, 7))
        place = re.search(r"GET (\S+) ", error["message"])
        assert place is not None
        found = await http.get(gateway.url + place[1])
        rest = data_of(found.text.splitlines())
        assert [event["sequence_number"] for event in rest] == list(range(9, 9 + len(rest)))
        assert rest[0]["delta"] == "0."
        assert rest[-1]["type"] == "response.incomplete"
        after = {"stream": "true", "starting_after": str(error["sequence_number"])}
        url = f"{gateway.url}/v1/responses/{claim.id}"
        assert (await http.get(url, params=after)).text == found.text


async def test_an_error_before_the_first_token_has_a_number_to_go_on_from(
    server: EmbeddedRedis, gateway: GatewayProcess, worker: FakeWorker, tmp_path: Path
) -> None:
    """Comments have come, so that the error is an event."""
    patient = GatewayProcess(
        server.url,
        tmp_path / "patient.log",
        gateway__drain_timeout_s=0.1,
        gateway__keep_alive_s=0.4,
        gateway__extra_models="played",
    )
    async with httpx.AsyncClient(timeout=60) as http:
        async with http.stream("POST", f"{patient.url}/v1/responses", json=ASKED) as response:
            claim = await worker.next_claim()
            patient.process.terminate()
            seen = data_of([line async for line in response.aiter_lines()])
        patient.kill()
        assert [event["type"] for event in seen] == [
            "response.created",
            "error",
        ]
        await worker.send(content(worker, claim, 0, 2), worker.ending(claim, 2))
        after = {"stream": "true", "starting_after": str(seen[-1]["sequence_number"])}
        found = await http.get(f"{gateway.url}/v1/responses/{claim.id}", params=after)
    assert data_of(found.text.splitlines())[0]["sequence_number"] == 1


@pytest.mark.parametrize("prompt", ["abc", ["a", "b"]], ids=["one", "several"])
async def test_a_whole_answer_is_to_be_asked_for_again(
    ending: GatewayProcess, worker: FakeWorker, prompt: object
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        body = {**BODY, "prompt": prompt}
        asking = asyncio.create_task(http.post(f"{ending.url}/v1/completions", json=body))
        claim = await worker.next_claim()
        await worker.send(worker.tokens(claim, 0, 5))
        ending.process.terminate()
        answer = await asking
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "gateway_shutdown"
    assert "send the request again" in error["message"]
    assert "/v1/streams" not in error["message"]

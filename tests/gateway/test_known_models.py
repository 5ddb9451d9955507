"""Models without a worker: what Redis holds is answered by any gateway, what is new gets 503."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from gateway.rig import GatewayProcess
from waiting import wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.producer.gateway.model_directory import ModelDirectory
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import load_settings

MODEL = "gone"
TEXT = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "seed": 1}
KEYED = {"idempotency-key": "before"}
ASKED = {"model": MODEL, "input": "abc", "max_output_tokens": 4}
MANY_KEYS = 150_000
LOOKED_FOR_S = 2.5


def start_worker(fleet: WorkerFactory, server: EmbeddedRedis, name: str) -> WorkerProcess:
    worker = fleet.supervised(name, "--model", "synthetic", "--name", MODEL)
    wait_until(lambda: has_workers(server), "its lease")
    return worker


def has_workers(server: EmbeddedRedis) -> bool:
    with redis.Redis.from_url(server.url) as client:
        return bool(client.zcard(f"ps:{{{MODEL}.0}}:leases"))


@pytest.fixture(scope="module")
def before(fleet: WorkerFactory, server: EmbeddedRedis, folder: Path) -> dict[str, Any]:
    """What another gateway answered while there was a worker; both have ended since."""
    worker = start_worker(fleet, server, "first")
    other = GatewayProcess(server.url, folder / "first.log")
    answers = {
        "completion": post(other, "/v1/completions", TEXT, **KEYED).json(),
        "response": post(other, "/v1/responses", ASKED).json(),
    }
    other.kill()
    worker.terminate()
    wait_until(lambda: not has_workers(server), "no worker")
    return answers


@pytest.fixture
def fresh(before: dict[str, Any], server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway that was started when there was no worker any more."""
    del before
    process = GatewayProcess(server.url, folder / "fresh.log")
    yield process
    process.kill()


def post(
    gateway: GatewayProcess, path: str, body: dict[str, Any], **headers: str
) -> httpx.Response:
    return httpx.post(gateway.url + path, json=body, headers=headers, timeout=60)


def get(gateway: GatewayProcess, path: str) -> httpx.Response:
    return httpx.get(gateway.url + path, timeout=60)


def test_what_is_stored_is_answered_without_a_worker(
    before: dict[str, Any], fresh: GatewayProcess
) -> None:
    response, completion = before["response"], before["completion"]
    assert len(response["output"][0]["content"][0]["text"]) == 4
    found = get(fresh, f"/v1/responses/{response['id']}")
    assert (found.status_code, found.json()) == (200, response)
    stream = get(fresh, f"/v1/streams/{completion['id']}")
    assert stream.status_code == 200
    assert stream.text.endswith("data: [DONE]\n\n")
    again = post(fresh, "/v1/completions", TEXT, **KEYED)
    assert (again.status_code, again.json()) == (200, completion)
    reused = post(fresh, "/v1/completions", {**TEXT, "max_tokens": 5}, **KEYED)
    assert reused.status_code == 422


@pytest.mark.usefixtures("before")
def test_what_is_new_is_told_to_come_back(fresh: GatewayProcess) -> None:
    for headers in ({}, {"idempotency-key": "after"}):
        refused = post(fresh, "/v1/completions", TEXT, **headers)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_unavailable"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
    unknown = post(fresh, "/v1/completions", {**TEXT, "model": "never"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert get(fresh, "/health").json() == {"status": "ok", "models": {}}
    assert get(fresh, "/v1/models").json()["data"] == []


@pytest.mark.usefixtures("before")
def test_openais_client_comes_back_to_a_worker(
    fresh: GatewayProcess, fleet: WorkerFactory, server: EmbeddedRedis
) -> None:
    seen: list[int] = []

    def start(response: httpx.Response) -> None:
        seen.append(response.status_code)
        if len(seen) == 1:
            start_worker(fleet, server, "second")

    http = httpx.Client(event_hooks={"response": [start]})
    with fresh.client(max_retries=2, http_client=http) as client:
        answer = client.completions.create(**TEXT)  # type: ignore[call-overload]
    assert len(answer.choices[0].text) == 4
    assert (seen[0], seen[-1]) == (503, 200)


async def test_ids_that_nobody_knows_do_not_keep_redis_busy(server: EmbeddedRedis) -> None:
    directory = ModelDirectory(load_settings({"redis.url": server.url}))
    loop = asyncio.get_running_loop()
    with redis.Redis.from_url(server.url) as client:
        names = [f"filler:{number}" for number in range(MANY_KEYS)]
        client.mset(dict.fromkeys(names, b""))

        def scans() -> int:
            return int(client.info("commandstats")["cmdstat_scan"]["calls"])  # type: ignore[index]

        try:
            await directory.connect()
            assert await directory.locate("nobody") is None
            first, began = scans(), loop.time()
            pages = MANY_KEYS // 1000
            assert first >= pages
            while loop.time() < began + LOOKED_FOR_S:
                assert await directory.locate("nobody") is None
            searches = (loop.time() - began) // (pages * 0.1)
            assert scans() - first <= searches * 2 * pages
        finally:
            await directory.aclose()
            for at in range(0, MANY_KEYS, 10_000):
                client.delete(*names[at : at + 10_000])


def test_what_may_wait_never_waits_in_a_shard_of_the_past(
    server: EmbeddedRedis, folder: Path
) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.hset("ps:{waits.7}:counters", "ended:completed", "1")
        patient = GatewayProcess(server.url, folder / "patient.log", gateway__extra_models="waits")
        try:
            for _ in range(8):  # by their ids, both shards would get some
                asked = {"model": "waits", "input": "abc", "background": True}
                assert post(patient, "/v1/responses", asked).status_code == 200
        finally:
            patient.kill()
        assert client.zcard("ps:{waits.0}:deadlines") == 8

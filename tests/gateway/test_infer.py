"""A batcher of a user's own over HTTP, from a shell, and in a batch file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from batches.conftest import drive, read_lines, start
from gateway.rig import GatewayProcess
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.cli.app import main
from penstock.shared.keys import BatchKeys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import load_settings


@pytest.fixture(scope="module", autouse=True)
def workers(fleet: WorkerFactory) -> None:
    path = str(Path(__file__).resolve().parents[1])
    fleet.supervised("d", "--batcher", "doubler:Doubler", "--name", "doubler", PYTHONPATH=path)
    fleet.supervised("b", "--batcher", "doubler:Bytes", "--name", "bytes", PYTHONPATH=path)


def post(gateway: GatewayProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/infer", json=body, timeout=60)


def test_over_http(gateway: GatewayProcess) -> None:
    answer = post(gateway, model="doubler", input={"x": 21})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["object"], body["model"]) == ("inference", "doubler")
    assert body["output"] == {"y": 42, "batch": 1}
    assert body["id"] == answer.headers["x-request-id"]


def test_bytes_go_and_come_as_base64(gateway: GatewayProcess) -> None:
    data = base64.b64encode(b"\xff\x00a").decode()
    output = post(gateway, model="bytes", input_base64=data).json()["output"]
    assert base64.b64decode(output) == b"a\x00\xff"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "missing_value"),
        ({"input": 1, "input_base64": "AA=="}, 400, "missing_value"),
        ({"input_base64": "?"}, 400, "invalid_value"),
        ({"input": {"x": 1, "raise": "value"}}, 400, "invalid_request"),
        ({"input": {"x": 1, "raise": "other"}}, 500, "engine_error"),
        ({"input": {"x": 1, "return": "nan"}}, 500, "invalid_answer"),
        ({"input": [2**70]}, 400, "invalid_value"),
    ],
)
def test_what_is_wrong(
    gateway: GatewayProcess, body: dict[str, Any], status: int, code: str
) -> None:
    answer = post(gateway, model="doubler", **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    line = f"POST /v1/infer {status} {answer.headers['x-request-id']}"
    wait_until(lambda: line in gateway.log.read_text(), "the log's line")


def test_from_a_shell(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    payloads = [json.dumps({"x": x}) for x in range(5)]
    assert main(["infer", "--model", "doubler", *payloads]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["y"] for line in lines] == [0, 2, 4, 6, 8]
    assert main(["infer", "--model", "doubler", "{"]) == 2
    assert "payload 1" in capsys.readouterr().err
    assert main(["infer", "--model", "doubler", '{"x": 1, "raise": "value"}']) == 1


async def test_in_a_batch_file(server: EmbeddedRedis, folder: Path) -> None:
    flags = {"redis.url": server.url, "batches.storage": str(folder / "files")}
    client = RetryingClient(server.url)
    await client.connect(BatchKeys().active)
    service = BatchService(client, load_settings(flags))
    fields = {"method": "POST", "url": "/v1/infer"}
    lines = [
        {"custom_id": str(x), **fields, "body": {"model": "doubler", "input": {"x": x}}}
        for x in range(40)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    batch = await drive(service, await start(service, data, endpoint="/v1/infer"))
    answers = {
        line["custom_id"]: line["response"]["body"]["output"]["y"]
        for line in await read_lines(service, batch.output_file_id)
    }
    assert answers == {str(x): 2 * x for x in range(40)}
    await service.aclose()
    await client.aclose()

"""Files and batches by HTTP, through OpenAI's own strict client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from batches.conftest import completion_lines
from gateway.rig import GatewayProcess
from waiting import wait_until

from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis

pytestmark = pytest.mark.usefixtures("synthetic_worker")


@pytest.fixture(scope="module")
def gateway(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway, and a process that drives its batches."""
    storage = str(folder / "files")
    process = GatewayProcess(
        server.url, folder / "gateway.log", batches__storage=storage,
        batches__max_file_bytes=1_000_000,
    )  # fmt: skip
    environment = {**os.environ, "REDIS_URL": server.url, "PENSTOCK_BATCHES__STORAGE": storage}
    command = [sys.executable, "-m", "penstock.producer.cli", "batches"]
    with (folder / "driver.log").open("wb") as log:
        driver = spawn_bound(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    yield process
    driver.kill()
    driver.wait(60)
    process.kill()


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("lines.jsonl", data), purpose="batch").id


def test_batch_by_openais_client(client: openai.OpenAI) -> None:
    file_id = upload(client, completion_lines(40))
    batch = client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"job": "nightly"},
    )
    assert batch.status == "validating"
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "completed", 60)
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed) == (40, 40)
    assert done.metadata == {"job": "nightly"}
    assert done.output_file_id is not None
    lines = client.files.content(done.output_file_id).text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(
        f"line {i}" for i in range(40)
    )
    assert batch.id in [item.id for item in client.batches.list(limit=1)]
    assert client.batches.cancel(batch.id).status == "completed"


def test_files_by_openais_client(client: openai.OpenAI) -> None:
    names = [upload(client, completion_lines(i + 1)) for i in range(3)]
    assert client.files.retrieve(names[0]).bytes == len(completion_lines(1))
    listed = [file.id for file in client.files.list(limit=2)]  # the client follows the pages
    assert set(names) <= set(listed)
    assert client.files.content(names[1]).read() == completion_lines(2)
    assert client.files.delete(names[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(names[0])


def test_failed_validation_names_the_line(client: openai.OpenAI) -> None:
    file_id = upload(client, completion_lines(2) + b"{}\n")
    batch = client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "failed", "failed", 60)
    errors = client.batches.retrieve(batch.id).errors
    assert errors is not None
    assert [error.line for error in errors.data or []] == [3]


def test_bad_requests_are_named(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    file_id = upload(client, completion_lines(1))
    good = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    for changes, param in [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/x"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"surprise": 1}, "surprise"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/batches", body={**good, **changes}, cast_to=object)
        assert refused.value.param == param
    for changes, param in [  # as escapes, which the client does not write
        ({"input_file_id": "\ud800"}, "input_file_id"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
    ]:
        body, headers = json.dumps({**good, **changes}), {"content-type": "application/json"}
        answer = httpx.post(f"{gateway.url}/v1/batches", content=body, headers=headers, timeout=60)
        named = answer.json()["error"]["param"]
        assert (answer.status_code, named.split(".")[0]) == (400, param)
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x", b"x"), purpose="assistants")
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("x", b"x" * 1_100_000), purpose="batch")
    assert large.value.status_code == 413
    empty = httpx.post(
        f"{gateway.url}/v1/files", data={"purpose": "batch"}, files={"x": b""}, timeout=60
    )
    assert empty.status_code == 400
    assert httpx.post(f"{gateway.url}/v1/files", json={}, timeout=60).status_code == 415
    assert httpx.get(f"{gateway.url}/v1/files?after=x", timeout=60).status_code == 400
    assert httpx.get(f"{gateway.url}/v1/batches/none", timeout=60).status_code == 404


def test_storage_that_fails_is_503_and_a_body_that_is_gone_404(
    client: openai.OpenAI, gateway: GatewayProcess, folder: Path
) -> None:
    file_id = upload(client, completion_lines(1))
    files, aside = folder / "files" / "files", folder / "aside"
    url, form = f"{gateway.url}/v1/files", {"purpose": "batch"}
    files.rename(aside)
    files.touch()
    try:
        answers = [
            httpx.post(url, data=form, files={"file": b"x"}, timeout=60),
            httpx.get(f"{url}/{file_id}/content", timeout=60),
        ]
    finally:
        files.unlink()
        aside.rename(files)
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "storage_unavailable")
        assert str(folder) not in error["message"]
    assert client.files.content(file_id).read() == completion_lines(1)
    (files / file_id).unlink()
    gone = httpx.get(f"{url}/{file_id}/content", timeout=60)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "file_not_found")
    assert client.files.delete(file_id).deleted
    assert "Traceback" not in (folder / "gateway.log").read_text()

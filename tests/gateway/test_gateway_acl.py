"""The gateway as a Redis user with the rights of ``deploy/acl/gateway.acl``, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from certificates import acl_rules
from gateway.rig import GatewayProcess
from redis.exceptions import NoPermissionError
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer.cli import main

TEXT = {"model": "letters", "prompt": "abc", "max_tokens": 4}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": TEXT}


@pytest.fixture
def confined_url(any_redis_url: str) -> Iterator[str]:
    with redis.Redis.from_url(any_redis_url) as admin:
        rules = acl_rules("gateway.acl", "gateway", "pw", "-", "letters.0").split()[1:]
        admin.execute_command("ACL SETUSER", *rules)
        admin.execute_command("ACL LOG", "RESET")
        yield any_redis_url.replace("//", "//gateway:pw@")
        admin.execute_command("ACL DELUSER", "gateway")


def test_every_endpoint_works_with_these_rights(
    any_redis_url: str, confined_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "create", "--tenant", "acme", "--json", "--redis", any_redis_url]) == 0
    secret = json.loads(capsys.readouterr().out)["secret"]
    workers = WorkerFactory(any_redis_url, tmp_path)
    workers.supervised("letters", "--model", "synthetic", "--name", "letters")
    gateway = GatewayProcess(confined_url, tmp_path / "gateway.log", queue__model="letters")
    headers = {"authorization": f"Bearer {secret}"}
    try:
        with httpx.Client(base_url=gateway.url, headers=headers, timeout=60) as client:
            wait_until(lambda: client.get("/v1/models/letters").is_success, "the model")
            call_all(client)
    finally:
        gateway.kill()
        workers.close()
    with redis.Redis.from_url(any_redis_url, decode_responses=True) as admin:
        denied = {entry["object"] for entry in admin.acl_log() if entry["username"] == "gateway"}
    # What redis-py sends by itself and nobody needs; and without SCAN no other model is found.
    assert denied <= {"client|setinfo", "client", "scan"}


def call_all(client: httpx.Client) -> None:
    """Use what uses Redis."""

    def done(method: str, path: str, **options: object) -> httpx.Response:
        answer = client.request(method, path, **options)  # type: ignore[arg-type]
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return answer

    named = {"idempotency-key": "one", "x-penstock-webhook": "https://93.184.215.14/"}
    for headers in (named, named, {}):
        answer = done("POST", "/v1/completions", json=TEXT, headers=headers)
    done("POST", "/v1/completions", json={**TEXT, "stream": True, "logprobs": 1, "echo": True})
    done("GET", f"/v1/streams/{answer.headers['x-request-id']}")
    done("POST", "/tokenize", json={"model": "letters", "prompt": "abc"})
    asked = {"model": "letters", "input": "abc", "background": True, "max_output_tokens": 4}
    response = done("POST", "/v1/responses", json=asked).json()["id"]
    done("POST", f"/v1/responses/{response}/cancel")
    done("GET", f"/v1/responses/{response}")
    done("DELETE", f"/v1/responses/{response}")
    form = {"file": ("lines.jsonl", json.dumps(LINE)), "purpose": (None, "batch")}
    file = done("POST", "/v1/files", files=form).json()["id"]
    wanted = {"input_file_id": file, "endpoint": LINE["url"], "completion_window": "24h"}
    batch = done("POST", "/v1/batches", json=wanted).json()["id"]
    for page in (f"/v1/batches/{batch}", "/v1/batches", "/v1/files", f"/v1/files/{file}/content"):
        done("GET", page)
    done("POST", f"/v1/batches/{batch}/cancel")
    done("DELETE", f"/v1/files/{file}")
    for page in ("/v1/models", "/v1/usage", "/health", "/metrics"):
        done("GET", page)


def test_it_reaches_nothing_else(confined_url: str) -> None:
    with redis.Redis.from_url(confined_url) as client:
        for key in ("ps:{letters.1}:counters", "ps:{other.0}:counters", "counters"):
            with pytest.raises(NoPermissionError):
                client.hset(key, "x", "1")
        for command in ("FLUSHALL", "KEYS *", "CONFIG GET *", "SCRIPT FLUSH", "ACL LIST"):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())

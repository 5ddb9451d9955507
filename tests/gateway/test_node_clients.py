"""OpenAI's client for Node.js and Vercel's AI SDK, unchanged, against a running gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from gateway.rig import GatewayProcess
from workers import WorkerFactory

from penstock.producer.gateway.access.key_records import KeyRecord, Limits
from penstock.producer.gateway.access.key_store import KeyStore
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.redis.retrying_client import RetryingClient

pytestmark = [
    pytest.mark.usefixtures("demo_worker"),
    pytest.mark.skipif(
        shutil.which("npm") is None, reason="Node.js is not installed: apt-get install nodejs npm"
    ),
]

ONE_CALL = {"258": 100, "259": -100, "261": 50}
"""Biases of the tool model: the end as soon as it is allowed, no reasoning, a call at once."""

REFUSALS = {
    "400": ("invalid_value", False),
    "401": ("invalid_api_key", False),
    "429": ("rate_limit_exceeded", True),
}
"""The code, and whether the SDK may try again."""


async def create_keys(url: str) -> list[str]:
    """A key without limits, and one whose limit is a request per minute."""
    client = RetryingClient(url)
    store = KeyStore(client)
    limits = (Limits(), Limits(requests_per_minute=1))
    made = [await store.create(KeyRecord("", "node", limits=one)) for one in limits]
    await client.aclose()
    return [secret for secret, _ in made]


def test_node_clients(
    server: EmbeddedRedis,
    gateway: GatewayProcess,
    fleet: WorkerFactory,
    tool_model: Path,
    tmp_path: Path,
) -> None:
    fleet.engine("caller", model__path=str(tool_model), queue__model="caller")
    key, spent = asyncio.run(create_keys(server.url))
    url, ask = f"{gateway.url}/v1", {"model": "demo", "prompt": "Hi", "max_tokens": 1}
    with httpx.Client(headers={"authorization": f"Bearer {spent}"}, timeout=60) as http:
        assert http.post(f"{url}/completions", json=ask).status_code == 200
    shutil.copytree(
        Path(__file__).parent / "node", tmp_path / "node",
        ignore=shutil.ignore_patterns("node_modules"),
    )  # fmt: skip
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    subprocess.run(install, cwd=tmp_path / "node", check=True, timeout=100, capture_output=True)
    environment = {
        "BASE_URL": url, "API_KEY": key, "SPENT_KEY": spent, "LOGIT_BIAS": json.dumps(ONE_CALL),
    }  # fmt: skip
    done = subprocess.run(
        ["node", "scenario.mjs"], cwd=tmp_path / "node", timeout=60, capture_output=True,
        text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("openaiChat", "openaiResponses", "aiSdk", "aiSdkTools"):
        assert found[name]["whole"]
        assert found[name]["whole"] == found[name]["streamed"], name
    assert found["refusal"] == {"status": 404, "code": "model_not_found"}
    rounds = found["aiSdkTools"]["whole"]
    assert len(rounds) == 2
    for step in rounds:
        assert step["reason"] == "tool-calls"
        (call,) = step["calls"]
        assert step["results"] == [f"{call['days']} days of rain in {call['city']}"]
    assert found["aiSdkTools"]["pieces"] == [step["calls"][0] for step in rounds]
    for status, (code, retry) in REFUSALS.items():
        refusals = found["aiSdkErrors"][status]
        assert len(refusals) == 2, refusals
        for refusal in refusals:
            assert refusal["message"]
            assert (refusal["status"], refusal["code"]) == (int(status), code)
            assert refusal["retry"] is retry

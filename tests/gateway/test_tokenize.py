"""``/tokenize`` and ``/detokenize`` by a worker of the demo model."""

from __future__ import annotations

import httpx
import pytest
from gateway.rig import GatewayProcess

pytestmark = pytest.mark.usefixtures("demo_worker")


def test_text_and_its_tokens_are_each_others_inverse(gateway: GatewayProcess) -> None:
    given = {"model": "demo", "prompt": "The list type"}
    found = httpx.post(f"{gateway.url}/tokenize", json=given, timeout=60).json()
    assert found["count"] == len(found["tokens"]) > 0
    back = {"model": "demo", "tokens": found["tokens"]}
    text = httpx.post(f"{gateway.url}/detokenize", json=back, timeout=60).json()
    assert text == {"prompt": "The list type"}
    chat = {"model": "demo", "messages": [{"role": "user", "content": "The list type"}]}
    rendered = httpx.post(f"{gateway.url}/tokenize", json=chat, timeout=60).json()
    assert rendered["count"] > found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"model": "demo"}, "prompt"),
        ("tokenize", {"model": "demo", "prompt": ""}, "prompt"),
        ("tokenize", {"model": "demo", "prompt": "x", "surprise": 1}, "surprise"),
        ("detokenize", {"model": "demo", "tokens": []}, "tokens"),
        ("detokenize", {"model": "demo", "tokens": ["x"]}, "tokens"),
    ],
)
def test_bad_body_is_named(
    gateway: GatewayProcess, path: str, body: dict[str, object], param: str
) -> None:
    answer = httpx.post(f"{gateway.url}/{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)

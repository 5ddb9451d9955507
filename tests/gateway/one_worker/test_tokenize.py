"""``/tokenize`` and ``/detokenize`` by a worker of the demo model."""

from __future__ import annotations

import httpx
import pytest
from gateway.rig import GatewayProcess


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


def test_tokens_of_prompts_are_no_tokens_to_the_bill(gateway: GatewayProcess) -> None:
    """What the ledger counts is what clients are told, also where an answer needs a second look."""

    def ledger() -> tuple[int, ...]:
        found = httpx.get(f"{gateway.url}/v1/usage?by=model", timeout=60).json()
        rows = [row for row in found["data"] if row["model"] == "demo"]
        names = ("requests", "prompt_tokens", "output_tokens")
        return tuple(sum(row[name] for row in rows) for name in names)

    def post(path: str, **body: object) -> httpx.Response:
        body = {"model": "demo", "prompt": "The list type", **body}
        answer = httpx.post(f"{gateway.url}/{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    before = ledger()
    count = post("tokenize").json()["count"]
    requests, *tokens = (now - then for now, then in zip(ledger(), before, strict=True))
    assert (requests, tokens) == (1, [0, 0])
    asked = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    told = post("v1/completions", **asked, echo=True, logprobs=1).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    post("v1/completions", **asked, stream=True, stream_options=options)
    _, *tokens = (now - then for now, then in zip(ledger(), before, strict=True))
    assert tokens == [2 * count, 6]
    assert tokens == [2 * told["prompt_tokens"], 2 * told["completion_tokens"]]


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

"""Streams that go on elsewhere: retries with a key, resumed events, other gateways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.rig import Event, GatewayProcess, events

from penstock.shared.local.embedded import EmbeddedRedis

BODY = {"model": "letters", "prompt": "abc", "max_tokens": 40, "stream": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def other(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "other.log")
    yield process
    process.kill()


def read(
    gateway: GatewayProcess, body: dict[str, Any], **headers: str
) -> tuple[int, list[Event] | Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{gateway.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=named, timeout=60) as response:
        if response.status_code != 200:
            response.read()
            return response.status_code, response.json()
        return 200, list(events(response))


def text(found: list[Event]) -> str:
    return "".join(event.text for event in found)


def test_a_retry_joins_and_any_event_resumes(
    gateway: GatewayProcess, other: GatewayProcess
) -> None:
    status, whole = read(gateway, BODY, idempotency_key="first")
    assert status == 200
    assert whole[-1] == Event(None, "[DONE]")
    ids = [event.id for event in whole[:-1]]
    assert ids == sorted(ids)
    assert ids[-2:] == [40, 40]
    assert len(text(whole)) == 40
    # The same events, without and with an index, at both gateways, from the log that one wrote.
    for number in (0, 1, 17, 39, 40):
        for place in (gateway, other):
            _, again = read(place, BODY, idempotency_key="first", last_event_id=str(number))
            assert text(again) == text(whole)[number:]
            assert {event.data["created"] for event in again[:-1]} == {whole[0].data["created"]}
            path = f"{place.url}/v1/streams/{whole[0].data['id']}"
            with httpx.stream("GET", path, params={"from": number}, timeout=60) as response:
                assert text(list(events(response))) == text(again)


def test_a_stream_is_taken_over_in_mid_sentence(
    gateway: GatewayProcess, other: GatewayProcess
) -> None:
    body = {**BODY, "prompt": "taken over", "max_tokens": 600}
    headers = {"idempotency-key": "taken over"}
    url = "/v1/completions"
    seen = ""
    with httpx.stream(
        "POST", gateway.url + url, json=body, headers=headers, timeout=60
    ) as response:
        for event in events(response):
            seen += event.text
            if event.id >= 50:  # an event may have several tokens, so none need end at 50
                break
    status, rest = read(other, body, **{**headers, "last_event_id": str(event.id)})
    assert status == 200
    assert len(seen + text(rest)) == 600
    _, whole = read(gateway, body, **headers)
    assert seen + text(rest) == text(whole)


def test_several_choices_have_one_reason_each_from_every_token(gateway: GatewayProcess) -> None:
    _, whole = read(gateway, {**BODY, "n": 2}, idempotency_key="two choices")
    path = f"{gateway.url}/v1/streams/{whole[0].data['id']}"
    last = whole[-2].id or 0
    for start in (0, last - 1, last):
        with httpx.stream("GET", path, params={"from": start}, timeout=60) as response:
            found = list(events(response))
        expected = sum(
            choice["finish_reason"] is not None
            for event in whole[:-1]
            if (event.id or 0) > start
            for choice in event.data["choices"]
        )
        reasons = [event.data["choices"][0]["finish_reason"] for event in found[:-1]]
        assert found[-1].data == "[DONE]"
        assert len(reasons) - reasons.count(None) == expected, start


def resumed(gateway: GatewayProcess, path: str, last: int, **params: str) -> list[Event]:
    """What an EventSource gets that reconnects: it repeats its URL and adds the header."""
    url, headers = f"{gateway.url}/v1/{path}", {"last-event-id": str(last)}
    with httpx.stream("GET", url, params=params, headers=headers, timeout=60) as response:
        return list(events(response))


def test_the_header_wins_over_the_parameter(gateway: GatewayProcess) -> None:
    _, whole = read(gateway, BODY, idempotency_key="event source")
    rest = resumed(gateway, f"streams/{whole[0].data['id']}", 17, **{"from": "3"})
    assert text(rest) == text(whole)[17:]
    body = {"model": "letters", "input": "abc", "max_output_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/responses", json=body, timeout=60) as response:
        live = list(events(response))
    name = response.headers["x-request-id"]
    for path, params in (
        (f"streams/{name}", {"from": "3"}),
        (f"responses/{name}", {"stream": "true", "starting_after": "3"}),
        (f"responses/{name}", {"stream": "true"}),
    ):
        assert resumed(gateway, path, live[9].id or 0, **params) == live[10:]


def test_a_key_with_another_body_is_refused(gateway: GatewayProcess) -> None:
    read(gateway, BODY, idempotency_key="second")
    for other in ({"max_tokens": 41}, {"user": "u"}, {"stream": False}):
        status, error = read(gateway, {**BODY, **other}, idempotency_key="second")
        assert status == 422
        assert error["error"]["code"] == "idempotency_key_reused"


def test_a_key_belongs_to_the_endpoint_that_was_called_first(gateway: GatewayProcess) -> None:
    chat = {"model": "letters", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    bodies = {
        "completions": {"model": "letters", "prompt": "abc", "max_tokens": 2},
        "chat/completions": {**chat, "stream": True, "stream_options": CONTINUOUS},
        "responses": {"model": "letters", "input": "abc", "max_output_tokens": 2},
    }
    for first in bodies:
        headers = {"idempotency-key": f"belongs to {first}"}
        for path in (first, *bodies, first):
            url = f"{gateway.url}/v1/{path}"
            answer = httpx.post(url, json=bodies[path], headers=headers, timeout=60)
            assert answer.status_code == (200 if path == first else 422), (first, path)


def test_resuming_needs_a_stream_that_exists(gateway: GatewayProcess) -> None:
    assert read(gateway, BODY, last_event_id="3")[0] == 400
    assert read(gateway, BODY, last_event_id="x", idempotency_key="third")[0] == 400
    assert httpx.get(f"{gateway.url}/v1/streams/cmpl-nothing", timeout=60).status_code == 404
    assert httpx.get(f"{gateway.url}/v1/streams/%00", timeout=60).status_code == 404
    _, whole = read(gateway, BODY, idempotency_key="third")
    path = f"{gateway.url}/v1/streams/{whole[0].data['id']}"
    past = httpx.get(path, params={"from": 41}, timeout=60)
    assert past.status_code == 400
    assert "from_index" not in past.text
    for number in ("", "-1", "1.5", "x", "2147483648"):
        refused = httpx.get(path, params={"from": number}, timeout=60)
        assert refused.status_code == 400
        message = f"from: got {number!r}; allowed: a whole number from 0 to 2147483647"
        assert refused.json()["error"]["message"] == message


@pytest.mark.parametrize("form", ["usage", "choices", "logprobs"])
def test_nothing_follows_behind_the_end(gateway: GatewayProcess, form: str) -> None:
    """Also where events depend on tokens before them, which are read then."""
    asked: dict[str, dict[str, Any]] = {
        "usage": {"stream_options": {"include_usage": True}},
        "choices": {"n": 2},
        "logprobs": {"logprobs": 1},
    }
    body, key = {**BODY, **asked[form]}, f"behind the end, {form}"
    status, whole = read(gateway, body, idempotency_key=key)
    assert status == 200
    last = whole[-2].id or 0
    for number, expected in ((last, 200), (last + 1, 400), (2**31 - 1, 400)):
        status, found = read(gateway, body, idempotency_key=key, last_event_id=str(number))
        assert status == expected
        if status == 400:
            assert f"got {number}; allowed: 0 to {last}" in found["error"]["message"]


def test_a_kept_stream_can_be_cancelled(gateway: GatewayProcess) -> None:
    body = {**BODY, "prompt": "cancelled", "max_tokens": 60_000}
    url = f"{gateway.url}/v1/completions"
    headers = {"x-penstock-on-disconnect": "continue"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        first = next(events(response))
    path = f"{gateway.url}/v1/streams/{first.data['id']}"
    with httpx.stream("GET", path, timeout=60) as response:
        found = events(response)
        assert next(found).id == first.id
        assert httpx.delete(path, timeout=60).json()["cancelled"] is True
        assert list(found)[-1].data["error"]["code"] == "request_cancelled"
    assert httpx.delete(path, timeout=60).json()["cancelled"] is False


def test_a_request_that_is_waited_for_whole_joins_too(gateway: GatewayProcess) -> None:
    body = {**BODY, "prompt": "whole", "stream": False}
    headers = {"idempotency-key": "whole"}
    answers = [
        httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60).json()
        for _ in range(2)
    ]
    assert answers[0] == answers[1]

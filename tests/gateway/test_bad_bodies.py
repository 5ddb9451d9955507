"""Malformed requests: 400 with the error object, never 500, nothing accepted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import redis
from gateway.rig import GatewayProcess

from penstock.shared.local.embedded import EmbeddedRedis

pytestmark = pytest.mark.usefixtures("synthetic_worker")

CHAT = {"model": "letters", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": "letters", "prompt": "Hi", "max_tokens": 4}

ASKED = {"model": "letters", "input": "Hi", "max_output_tokens": 4}

BASES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


def json_schema(**members: object) -> dict[str, Any]:
    """A form of the output that is right but for these members."""
    named = {"name": "answer", "schema": {}, **members}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def text_format(**members: object) -> dict[str, Any]:
    """The same as the Responses API words it."""
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, **members}}}


def item(**members: object) -> dict[str, Any]:
    """The input of a response with one item that is right but for these members."""
    return {"input": [{"role": "user", "content": "Hi", **members}]}


def part(**members: object) -> dict[str, Any]:
    """The same with one part of its content."""
    return item(content=[{"type": "input_text", "text": "Hi", **members}])


def tool(**members: object) -> dict[str, Any]:
    """A function that is right but for these members."""
    return {"tools": [{"type": "function", "name": "f", "parameters": {}, **members}]}


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"model": 7}, "model"),
    ({"model": ""}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 10**400}, "n"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias['x']"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": "yes"}, "stream"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": 7}}, "response_format.json_schema"),
    (json_schema(name="bad name!"), "response_format.json_schema.name"),
    (json_schema(strict="yes"), "response_format.json_schema.strict"),
    (json_schema(description=7), "response_format.json_schema.description"),
    (json_schema(schema="{}"), "response_format.json_schema.schema"),
    (json_schema(foo=1), "response_format.json_schema.foo"),
    ({"audio": {}}, "audio"),
    ({"suffix": "x"}, "suffix"),
    ({"\ud800": 1}, r"\ud800"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(
    gateway: GatewayProcess, change: dict[str, Any], param: str
) -> None:
    data = json.dumps({**CHAT, **change})
    reply = post(gateway, "/v1/chat/completions", data)
    error = check(reply, 400)
    assert error["param"] == param


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"text": {"foo": 1}}, "text.foo"),
    ({"text": {"format": "text"}}, "text.format"),
    ({"text": {"format": {"type": "text", "foo": 1}}}, "text.format.foo"),
    ({"text": {"format": {"type": ["text"]}}}, "text.format.type"),
    (text_format(name="bad name!"), "text.format.name"),
    (text_format(strict="yes"), "text.format.strict"),
    (text_format(schema="{}"), "text.format.schema"),
    (text_format(foo=1), "text.format.foo"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": "no"}},
        "stream_options.include_obfuscation",
    ),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    (item(status=7), "input[0].status"),
    (item(foo=1), "input[0].foo"),
    (part(foo=1), "input[0].content[0].foo"),
    (part(annotations=[]), "input[0].content[0].annotations"),
    (part(type="output_text", annotations={}), "input[0].content[0].annotations"),
    (part(text=7), "input[0].content[0]"),
    ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary"),
    (tool(strict="yes"), "tools[0].strict"),
    (tool(parameters=[]), "tools[0].parameters"),
    (tool(name="bad name!"), "tools[0].name"),
    ({"reasoning": {"effort": 7}}, "reasoning.effort"),
]


@pytest.mark.parametrize(("change", "param"), BAD_RESPONSES, ids=lambda value: str(value)[:40])
def test_a_wrong_member_of_a_response_is_named(
    gateway: GatewayProcess, change: dict[str, Any], param: str
) -> None:
    error = check(post(gateway, "/v1/responses", json.dumps({**ASKED, **change})), 400)
    assert error["param"] == param


def test_members_that_are_null_count_as_not_given(gateway: GatewayProcess) -> None:
    given = part(type="output_text", annotations=[], logprobs=None, foo=None)
    given["input"][0] |= {"status": "completed", "id": "x", "encrypted_content": None}
    data = json.dumps({**ASKED, **given, "text": {"format": {"type": "text", "name": None}}})
    assert post(gateway, "/v1/responses", data).status_code == 200
    form = {"response_format": {"type": "text", "json_schema": None}}
    assert post(gateway, "/v1/chat/completions", json.dumps({**CHAT, **form})).status_code == 200


MESSAGE = {"role": "user", "content": "Hi"}
OF_ANOTHER_KIND: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [MESSAGE]}, "prompt[0]"),
    ("/v1/completions", {"prompt": ["a", [MESSAGE]]}, "prompt[1][0]"),
    ("/tokenize", {"messages": [1, 2]}, "messages[0]"),
    ("/tokenize", {"messages": [MESSAGE, 1]}, "messages[1]"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [MESSAGE]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, MESSAGE]}, "tokens[1]"),
]


@pytest.mark.parametrize(("path", "body", "param"), OF_ANOTHER_KIND)
def test_a_prompt_of_another_kind_is_named(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str
) -> None:
    error = check(post(gateway, path, json.dumps({"model": "letters", **body})), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", ""], ["a", 1], [1, "a"], [-1], [[1, "a"]], {"a": 1}, 7]
)
def test_a_wrong_prompt_is_named(gateway: GatewayProcess, prompt: object) -> None:
    reply = post(gateway, "/v1/completions", json.dumps({**TEXT, "prompt": prompt}))
    assert check(reply, 400)["param"].startswith("prompt")


HALF = "\ud800"
HALVES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "model": HALF}, "model"),
    ("/v1/chat/completions", {**CHAT, "user": HALF}, "user"),
    ("/v1/chat/completions", {**CHAT, "stop": ["a", HALF]}, "stop[1]"),
    ("/v1/chat/completions", {**CHAT, "metadata": {"a": HALF}}, "metadata.a"),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": HALF}}]},
        "tools[0].function.name",
    ),
    ("/v1/completions", {**TEXT, "prompt": ["a", f"😀{HALF}"]}, "prompt[1]"),
    ("/v1/responses", {"model": "letters", "input": "a", "metadata": {HALF: "a"}}, "metadata."),
    ("/v1/responses", {"model": "letters", "input": [{"content": HALF}]}, "input[0].content"),
    ("/v1/batches", {"input_file_id": HALF}, "input_file_id"),
    ("/v1/embeddings", {"model": "letters", "input": [HALF]}, "input[0]"),
    ("/v1/infer", {"model": "letters", "input": {"a": [HALF]}}, "input.a[0]"),
    ("/tokenize", {"model": "letters", "prompt": HALF}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), HALVES, ids=lambda value: str(value)[:40])
def test_half_of_a_surrogate_pair_is_named(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str
) -> None:
    error = check(post(gateway, path, json.dumps(body)), 400)
    assert error["param"] == (param + r"\ud800" if param.endswith(".") else param)


def test_text_whose_pairs_are_whole_is_served(gateway: GatewayProcess) -> None:
    for data in (json.dumps({**TEXT, "prompt": "😀"}), json.dumps({**TEXT, "prompt": r"\ud800"})):
        assert post(gateway, "/v1/completions", data).status_code == 200


DEEP: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/responses",
        {**ASKED, **text_format(schema={"maximum": "NUMBER"}), "background": True},
        "text.format.schema.maximum",
    ),
    (
        "/v1/responses",
        {**ASKED, **tool(parameters={"properties": {"a": {"enum": [1, "NUMBER"]}}})},
        "tools[0].parameters.properties.a.enum[1]",
    ),
    ("/v1/responses", {**ASKED, "metadata": {"a": "NUMBER"}}, "metadata.a"),
    (
        "/v1/chat/completions",
        {**CHAT, **json_schema(schema={"maximum": "NUMBER"})},
        "response_format.json_schema.schema.maximum",
    ),
    ("/v1/chat/completions", {**CHAT, "metadata": {"a": "NUMBER"}}, "metadata.a"),
    ("/v1/completions", {**TEXT, "logit_bias": {"1": "NUMBER"}}, "logit_bias.1"),
    ("/v1/batches", {"metadata": {"a": "NUMBER"}}, "metadata.a"),
    ("/v1/infer", {"model": "letters", "input": {"a": [0.5, "NUMBER"]}}, "input.a[1]"),
    ("/tokenize", {"model": "letters", "prompt": "NUMBER"}, "prompt"),
]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "-Infinity"])
@pytest.mark.parametrize(("path", "body", "param"), DEEP, ids=lambda value: str(value)[:40])
def test_a_number_that_is_not_finite_is_named(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str, number: str
) -> None:
    data = json.dumps(body).replace('"NUMBER"', number)
    error = check(post(gateway, path, data), 400)
    assert (error["param"], error["code"]) == (param, "invalid_json")
    assert number in error["message"]


def test_every_field_of_every_endpoint_refuses_a_number_that_is_none(
    gateway: GatewayProcess,
) -> None:
    headers, asked = {"content-type": "application/json"}, 0
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=60) as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            form = methods.get("post", {}).get("requestBody", {"content": {}})["content"]
            if "application/json" not in form:
                continue
            fields = form["application/json"]["schema"]["properties"]
            base = BASES.get(path, {"model": "letters"})
            for name in fields:
                if (path, name) == ("/v1/infer", "input"):
                    continue  # which may be any number
                body = {key: base[key] for key in base if key in fields} | {name: "NUMBER"}
                for number in ("1e400", "1" + "0" * 400):
                    data = json.dumps(body).replace('"NUMBER"', number)
                    error = check(client.post(path, content=data), 400)
                    assert error["param"] == name, (path, number)
                    asked += 1
            for data in ("", "{}", "null", '{"a":1}{"a":2}', '{"a":' * 200 + "1" + "}" * 200):
                check(client.post(path, content=data), 400)
            refused = client.post(path, content="{}", headers={"content-type": "text/plain"})
            assert check(refused, 415)["code"] == "unsupported_media_type"
            packed = client.post(path, content="{}", headers={"content-encoding": "gzip"})
            assert "gzip" in check(packed, 415)["message"]
    assert asked > 200


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b'{"a":' * 5000,
        b"[" * 100_000, b'{"model":1e999999}', b'{"n":' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: str(data[:12]),
)  # fmt: skip
def test_what_is_no_object_is_refused(gateway: GatewayProcess, data: bytes) -> None:
    check(post(gateway, "/v1/chat/completions", data), 400)


def test_both_names_of_a_limit_may_say_the_same(gateway: GatewayProcess) -> None:
    data = json.dumps({**CHAT, "max_completion_tokens": CHAT["max_tokens"]})
    assert post(gateway, "/v1/chat/completions", data).status_code == 200


def test_a_number_that_is_too_long_is_called_so(gateway: GatewayProcess) -> None:
    error = check(post(gateway, "/v1/completions", b'{"n":' + b"9" * 5000 + b"}"), 400)
    assert error["message"].endswith("a number in it is too long")


def test_health_answers_who_asks_for_a_head_alone(gateway: GatewayProcess) -> None:
    answer = httpx.head(f"{gateway.url}/health", timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")


def test_other_refusals(gateway: GatewayProcess) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    assert (
        check(httpx.post(url, content=b"{}", timeout=60), 415)["code"] == "unsupported_media_type"
    )
    assert check(post(gateway, "/v1/nothing", b"{}"), 404)["code"] == "not_found"
    assert check(httpx.get(url, timeout=60), 405)["code"] == "method_not_allowed"
    large = json.dumps({**CHAT, "user": "x" * (5 << 20)})
    assert check(post(gateway, "/v1/chat/completions", large), 413)["code"] == "body_too_large"
    chunked = httpx.post(
        url,
        content=iter([b'{"user":"', *[b"x" * (1 << 20)] * 5, b'"}']),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert check(chunked, 413)["code"] == "body_too_large"


def test_a_worker_that_refuses_is_heard_with_its_own_status(gateway: GatewayProcess) -> None:
    body = {**CHAT, "response_format": {"type": "json_object"}, "stream": True}
    error = check(post(gateway, "/v1/chat/completions", json.dumps(body)), 400)
    assert error["param"] == "response_format"
    long = {**TEXT, "prompt": "x" * 70_000, "stream": True}
    error = check(post(gateway, "/v1/completions", json.dumps(long)), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_a_worker_refuses_is_an_error(
    gateway: GatewayProcess, stream: bool
) -> None:
    body = {**ASKED, "stream": stream, "text": {"format": {"type": "json_object"}}}
    error = check(post(gateway, "/v1/responses", json.dumps(body)), 400)
    assert error["param"] == "text.format"
    assert error["message"].startswith("text.format: ")
    long = {**ASKED, "stream": stream, "input": "x" * 70_000}
    error = check(post(gateway, "/v1/responses", json.dumps(long)), 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_a_response_in_the_background_fails_in_openais_names(gateway: GatewayProcess) -> None:
    form = {"text": {"format": {"type": "json_object"}}}
    reply = post(gateway, "/v1/responses", json.dumps({**ASKED, **form, "background": True}))
    assert reply.status_code == 200
    path = f"{gateway.url}/v1/responses/{reply.json()['id']}"
    # The events end with the response.
    events = httpx.get(path, params={"stream": "true"}, timeout=60)
    assert "event: response.failed\n" in events.text
    failed = httpx.get(path, timeout=60).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
    assert failed["error"]["message"].startswith("text.format: ")


def test_nothing_was_accepted(gateway: GatewayProcess, server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.zcard("ps:{letters.0}:deadlines") == 0


def post(gateway: GatewayProcess, path: str, data: bytes | str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(gateway.url + path, content=data, headers=headers, timeout=60)


def check(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has all four of its names."""
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return dict(error)

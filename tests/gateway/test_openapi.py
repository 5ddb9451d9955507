"""The documented API, tried by schemathesis: no answer is a server error or undocumented.

No case may ask for thousands of tokens: clients give up after 20 s. So the worker does not pause
between steps, and who names no number gets four tokens.

A short run; ``make api-fuzz`` sends 20,000 cases. Set ``API_FUZZ_EXAMPLES`` for another number per
operation, and ``API_FUZZ_SEED`` for other cases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema_rs
import pytest
from gateway.rig import GatewayProcess
from workers import WorkerFactory

from penstock.shared.local.embedded import EmbeddedRedis

pytestmark = pytest.mark.usefixtures("quick_worker")

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)

EXAMPLES, CASES = 3000, 20_000
"""Of ``make api-fuzz``: how many per operation, and the least that they must come to in all. Pages
without a body have few different ones."""

MAX_TOKENS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


@pytest.fixture(scope="module")
def quick_worker(fleet: WorkerFactory) -> None:
    fleet.supervised(
        "letters", "--model", "synthetic", "--name", "letters",
        PENSTOCK_MODEL__SYNTHETIC_STEP_MS="0",
    )  # fmt: skip


@pytest.fixture(scope="module")
def gateway(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "gateway.log", gateway__default_max_tokens=4)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def document(gateway: GatewayProcess, folder: Path) -> Path:
    """The document, with the one model there is in place of any text."""
    page = httpx.get(f"{gateway.url}/openapi.json", timeout=60).json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        properties = body["schema"]["properties"]
        properties["model"] = {"const": "letters"}
        for name in MAX_TOKENS & properties.keys():
            properties[name] = {"type": "integer", "minimum": 1, "maximum": 4}
    path = folder / "openapi.json"
    path.write_text(json.dumps(page))
    return path


def run_schemathesis(gateway: GatewayProcess, document: Path, examples: int, *flags: str) -> str:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", gateway.url,
        "--checks", CHECKS, "--max-examples", str(examples), "--no-color",
        "--seed", os.environ.get("API_FUZZ_SEED", "1"), "--request-timeout", "20",
        "--continue-on-failure", *flags,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, cwd=document.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


def test_the_api_is_as_it_is_documented(gateway: GatewayProcess, document: Path) -> None:
    run_schemathesis(gateway, document, 5, "--phases", "fuzzing", "--no-shrink")


@pytest.mark.slow
def test_the_api_is_as_it_is_documented_in_many_cases(
    gateway: GatewayProcess, document: Path
) -> None:
    examples = int(os.environ.get("API_FUZZ_EXAMPLES", EXAMPLES))
    summary = run_schemathesis(gateway, document, examples)[-2000:]
    print(summary)
    cases = re.search(r"Test cases:\n\s+(\d+) generated", summary)
    assert cases is not None
    assert int(cases[1]) >= CASES * min(examples, EXAMPLES) // EXAMPLES


def test_streamed_answers_are_as_they_are_documented(
    gateway: GatewayProcess, document: Path
) -> None:
    """Random bodies rarely ask for a stream that works; these always do."""
    page = json.loads(document.read_text())
    body = page["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    body["schema"] = {
        "type": "object",
        "required": ["model", "prompt", "stream", "max_tokens"],
        "additionalProperties": False,
        "properties": {
            "model": {"const": "letters"},
            "prompt": {"enum": ["a", "b c"]},
            "stream": {"const": True},
            "max_tokens": {"enum": [1, 2, 4]},
        },
    }
    streamed = document.with_name("streamed.json")
    streamed.write_text(json.dumps(page))
    flags = ("--phases", "fuzzing", "--mode", "positive", "--include-path", "/v1/completions")
    run_schemathesis(gateway, streamed, 5, "--no-shrink", *flags)


MODEL = {"model": "letters"}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
LEAST: list[tuple[str, dict[str, object]]] = [
    ("/v1/chat/completions", {**MODEL, **MESSAGES}),
    ("/v1/completions", {**MODEL, "prompt": "Hi"}),
    ("/v1/responses", {**MODEL, "input": "Hi"}),
    ("/v1/embeddings", {**MODEL, "input": "Hi"}),
    ("/v1/rerank", {**MODEL, "query": "Hi", "documents": ["Ho"]}),
    ("/v1/classify", {**MODEL, "input": "Hi"}),
    ("/v1/infer", {**MODEL, "input": "Hi"}),
    ("/v1/infer", {**MODEL, "input": None, "input_base64": "SGk="}),
    ("/tokenize", {**MODEL, "prompt": "Hi"}),
    ("/tokenize", {**MODEL, **MESSAGES}),
    ("/detokenize", {**MODEL, "tokens": [1]}),
    (
        "/v1/batches",
        {"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"},
    ),
]
BOTH: list[tuple[str, dict[str, object]]] = [
    ("/v1/infer", {**MODEL, "input": "Hi", "input_base64": "SGk="}),
    ("/tokenize", {**MODEL, "prompt": "Hi", **MESSAGES}),
]


def test_what_is_required_is_documented(gateway: GatewayProcess) -> None:
    """Without any of these fields a body is refused, by the document as by the endpoint."""
    page = httpx.get(f"{gateway.url}/openapi.json", timeout=60).json()
    bodies = {
        path: body["content"]["application/json"]["schema"]
        for path, methods in page["paths"].items()
        if "application/json" in (body := methods.get("post", {}).get("requestBody", {})).get(
            "content", ())
    }  # fmt: skip
    assert {path for path, _ in LEAST} == set(bodies)

    def is_complete(path: str, body: dict[str, object]) -> bool:
        answer = httpx.post(f"{gateway.url}{path}", json=body, timeout=60).json()
        error = answer.get("error") or {}  # a response has one that is null
        return bool(error.get("code") != "missing_value")

    for path, body in LEAST:
        given = [name for name, value in body.items() if value is not None]
        parts = [{key: body[key] for key in body if key != name} for name in given]
        for one, complete in ((body, True), *((part, False) for part in parts)):
            assert is_complete(path, one) == complete, (path, one)
            assert jsonschema_rs.is_valid(bodies[path], one) == complete, (path, one)
    for path, body in BOTH:
        assert not is_complete(path, body)
        assert not jsonschema_rs.is_valid(bodies[path], body)


def test_every_error_is_documented(gateway: GatewayProcess) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json", timeout=60).json()
    assert document["openapi"].startswith("3.1")
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "408", "413", "422", "429", "503", "504"} <= set(answers)

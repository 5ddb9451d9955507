"""Embeddings, rankings and classes: worker, client, gateway and clients that others built."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from encoder_models import WIDTH, save_encoder, save_modules
from gateway.rig import GatewayProcess
from pydantic import SecretStr
from workers import WorkerFactory

from penstock.producer import BlockingProducer, Producer, RequestFailed
from penstock.producer.administration.usage import UsageReader
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import load_settings

TEXTS = ["a text", "another, longer text", "ünïcode"]


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    prompts = {"query": "Find: ", "document": ""}
    made = {name: folder / name for name in ("embed", "rerank", "classify")}
    save_modules(save_encoder("bert", made["embed"]), "mean", normalize=True, prompts=prompts)
    save_encoder("roberta", made["rerank"], labels=1)
    labels = {0: "good", 1: "bad", 2: "unknown"}
    save_encoder("distilbert", made["classify"], labels=3, id2label=labels)
    return made


@pytest.fixture(scope="module", autouse=True)
def workers(fleet: WorkerFactory, models: dict[str, Path]) -> None:
    """One for each kind of model."""
    for name, path in models.items():
        fleet.supervised(name, "--model", str(path), "--name", name)
    fleet.supervised("letters", "--model", "synthetic", "--name", "letters")


@pytest.fixture
async def producer(server: EmbeddedRedis) -> AsyncIterator[Producer]:
    async with Producer(server.url, model="embed") as producer:
        yield producer


def post(gateway: GatewayProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json=body, timeout=60)


async def test_producer_embeds(producer: Producer) -> None:
    found = await producer.embed(TEXTS)
    vectors = np.array(found.vectors)
    assert vectors.shape == (3, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    one = await producer.embed(TEXTS[1])
    np.testing.assert_allclose(np.array(one.vectors)[0], vectors[1], atol=1e-5)
    assert one.tokens == len(TEXTS[1]) + 2
    short = await producer.embed(TEXTS, dimensions=4, prompt="query")
    assert np.array(short.vectors).shape == (3, 4)
    ids = await producer.embed([5, 6, 7])
    assert ids.tokens == 3


async def test_a_long_list_is_divided_and_comes_back_in_order(producer: Producer) -> None:
    texts = [f"text number {number}" for number in range(600)]
    found = await producer.embed(texts, id="long-list")
    assert len(found.packed) == 600
    alone = await producer.embed(texts[599])
    assert np.array(found.vectors)[599] == pytest.approx(list(alone.vectors[0]), abs=1e-5)
    assert (await producer.status("long-list:256")).n == 1
    with pytest.raises(RequestFailed, match=r"input\[100\]") as failed:
        await producer.embed([*texts[:356], "x" * 100])
    assert "number 256" in failed.value.__notes__[0]


async def test_usage_and_the_ledger_count_the_texts_tokens(
    producer: Producer, server: EmbeddedRedis
) -> None:
    submitted = await producer.submit(payload={"input": ["abc", "de"]}, tenant="counted")
    result = await producer.result(submitted.id)
    assert result.usage is not None
    assert result.usage.prompt_tokens == result.value["tokens"] == 3 + 2 + 4
    async with UsageReader(load_settings({"redis.url": server.url})) as reader:
        rows = await reader.read(tenant="counted")
    assert sum(row.counts.prompt_tokens for row in rows) == 9
    assert sum(row.counts.output_tokens for row in rows) == 0


async def test_a_failure_says_what_is_wrong(producer: Producer) -> None:
    with pytest.raises(RequestFailed, match="at most 64 tokens"):
        await producer.embed(["x" * 80])
    assert (await producer.embed(["x" * 80], truncate=True)).tokens == 64


def test_blocking_calls(server: EmbeddedRedis) -> None:
    with BlockingProducer(server.url, model="rerank") as producer:
        ranking = producer.rerank("question", ["one", "two", "three"])
        assert len(ranking.scores) == 3
        assert sorted(ranking.order) == [0, 1, 2]
        assert ranking.scores[ranking.order[0]] == max(ranking.scores)
    with BlockingProducer(server.url, model="classify") as producer:
        classes = producer.classify(["a", ("b", "c")])
        assert classes.labels == ("good", "bad", "unknown")
        assert [sum(row) for row in classes.probs] == pytest.approx([1, 1])
        assert set(classes.best) <= set(classes.labels)
    with BlockingProducer(server.url, model="embed") as producer:
        assert len(producer.embed("x").packed) == 1


def test_openai_client_gets_floats_and_base64(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    options = {"model": "embed", "encoding_format": "float"}
    whole = client.embeddings.create(input=TEXTS, **options)
    assert [entry.index for entry in whole.data] == [0, 1, 2]
    assert whole.usage.prompt_tokens == whole.usage.total_tokens > 0
    # By default the client asks for base64 and reads it, which its own strict mode refuses.
    with gateway.client(_strict_response_validation=False) as lenient:
        one = lenient.embeddings.create(model="embed", input=TEXTS[0])
    assert one.data[0].embedding == pytest.approx(whole.data[0].embedding, abs=1e-5)
    ids = client.embeddings.create(input=[[5, 6], [7]], dimensions=3, **options)
    assert [len(entry.embedding) for entry in ids.data] == [3, 3]
    packed = post(gateway, "/v1/embeddings", model="embed", input="x", encoding_format="base64")
    raw = base64.b64decode(packed.json()["data"][0]["embedding"])
    assert np.linalg.norm(np.frombuffer(raw, "<f4")) == pytest.approx(1, abs=1e-6)


def test_langchain_embeds(gateway: GatewayProcess) -> None:
    from langchain_openai import OpenAIEmbeddings  # other test files need not wait for it

    embeddings = OpenAIEmbeddings(
        model="embed",
        base_url=f"{gateway.url}/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,  # it would send another tokenizer's ids
    )
    documents = embeddings.embed_documents(TEXTS)
    assert len(documents) == 3
    assert documents[0] == pytest.approx(embeddings.embed_query(TEXTS[0]), abs=1e-5)


def test_rerank(gateway: GatewayProcess) -> None:
    documents = ["one", {"text": "two"}, "three"]
    body = {"model": "rerank", "query": "q", "documents": documents}
    whole = post(gateway, "/v1/rerank", **body).json()
    scores = [entry["relevance_score"] for entry in whole["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(entry["index"] for entry in whole["results"]) == [0, 1, 2]
    assert "document" not in whole["results"][0]
    top = post(gateway, "/v1/rerank", **body, top_n=1, return_documents=True).json()
    (best,) = top["results"]
    assert best["index"] == whole["results"][0]["index"]
    assert best["document"]["text"] == ["one", "two", "three"][best["index"]]
    assert top["usage"]["total_tokens"] > 0


def test_classify(gateway: GatewayProcess) -> None:
    answer = post(gateway, "/v1/classify", model="classify", input=["one", "two"]).json()
    assert answer["labels"] == ["good", "bad", "unknown"]
    for entry in answer["data"]:
        assert sum(entry["probs"]) == pytest.approx(1)
        assert entry["label"] == answer["labels"][int(np.argmax(entry["probs"]))]
        assert entry["num_classes"] == 3


def test_models_tell_their_kind(gateway: GatewayProcess) -> None:
    models = httpx.get(f"{gateway.url}/v1/models", timeout=60).json()["data"]
    kinds = {model["id"]: model["kind"] for model in models}
    assert kinds == {
        "embed": "embed", "rerank": "rerank", "classify": "classify", "letters": "generate",
    }  # fmt: skip
    assert {model["max_model_len"] for model in models if model["kind"] != "generate"} == {64}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/embeddings", {"model": "letters", "input": "x"}, 400, "wrong_model_kind", "model"),
        ("/v1/embeddings", {"model": "rerank", "input": "x"}, 400, "wrong_model_kind", "model"),
        ("/v1/completions", {"model": "embed", "prompt": "x"}, 400, "wrong_model_kind", "model"),
        ("/v1/embeddings", {"model": "none", "input": "x"}, 404, "model_not_found", "model"),
        ("/v1/embeddings", {"model": "embed"}, 400, "missing_value", "input"),
        ("/v1/embeddings", {"model": "embed", "input": []}, 400, "missing_value", "input"),
        ("/v1/embeddings", {"model": "embed", "input": 5}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"model": "embed", "input": [1.5]}, 400, "invalid_request", "input[0]"),
        ("/v1/embeddings", {"model": "embed", "input": ["x", "y" * 99]}, 400, "invalid_request",
         "input[1]"),
        ("/v1/embeddings", {"model": "embed", "input": "x", "dimensions": 99}, 400,
         "invalid_request", "dimensions"),
        ("/v1/embeddings", {"model": "embed", "input": "x", "encoding_format": "int8"}, 400,
         "invalid_value", "encoding_format"),
        ("/v1/embeddings", {"model": "embed", "input": "x", "prompt_name": "poem"}, 400,
         "invalid_request", "prompt_name"),
        ("/v1/embeddings", {"model": "embed", "input": "x", "dimension": 3}, 400,
         "unknown_parameter", "dimension"),
        ("/v1/rerank", {"model": "rerank", "documents": ["x"]}, 400, "missing_value", "query"),
        ("/v1/rerank", {"model": "rerank", "query": "x", "documents": [3]}, 400, "invalid_value",
         "documents[0]"),
        ("/v1/classify", {"model": "classify", "input": [[]]}, 400, "invalid_request", "input[0]"),
    ],
)  # fmt: skip
def test_bad_requests(
    gateway: GatewayProcess, path: str, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = post(gateway, path, **body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


def test_the_command_embeds_lines(server: EmbeddedRedis) -> None:
    command = [sys.executable, "-m", "penstock.producer.cli", "embed", "--model", "embed"]
    run = subprocess.run(
        [*command, "--redis", server.url, "--dimensions", "3", "-"],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert [len(line["embedding"]) for line in lines] == [3, 3]
    assert "2 texts, 10 tokens" in run.stderr

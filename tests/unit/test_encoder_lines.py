"""Lines of batch files for encoders: what they ask for, and how a worker's answer is written."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from penstock.producer.batches.lines.line_endpoints import LineRefused, line_endpoint
from penstock.producer.gateway.openai.token_logprobs import TokenNames
from penstock.producer.results import Result
from penstock.shared.protocol.events import End
from penstock.shared.protocol.payload import pack_result
from penstock.shared.protocol.states import Reason


def answered(url: str, body: dict[str, Any], value: object, **end: Any) -> dict[str, Any]:
    """The output line's response to a body, where a worker answers with this value."""
    ended = End(n=1, **({"reason": Reason.STOP} | end))
    packed = b"" if value is None else pack_result(value)
    result = Result(id="line", choices=(), end=ended, packed_value=packed)
    return line_endpoint(url).translate(body).respond("b:1", result, TokenNames(()))


def test_embeddings() -> None:
    body = {"model": "m", "input": [[5, 6], [7]], "dimensions": 2}
    translation = line_endpoint("/v1/embeddings").translate(body)
    assert translation.fields == {"payload": {"input": [[5, 6], [7]], "dimensions": 2}}
    packed = b"\x00\x00\x80\x3f\x00\x00\x00\x40"
    response = answered("/v1/embeddings", body, {"embeddings": [packed, packed], "tokens": 3})
    assert response["status_code"] == 200
    whole = CreateEmbeddingResponse.model_validate(response["body"])
    assert [entry.embedding for entry in whole.data] == [[1.0, 2.0], [1.0, 2.0]]
    assert whole.usage.total_tokens == 3


def test_rankings_and_classes() -> None:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}
    response = answered("/v1/rerank", body, {"scores": [0.1, 0.9], "tokens": 8})
    assert response["body"]["results"] == [{"index": 1, "relevance_score": 0.9}]
    value = {"labels": ["x", "y"], "probs": [[0.2, 0.8]], "tokens": 3}
    response = answered("/v1/classify", {"model": "m", "input": "a"}, value)
    assert response["body"]["data"][0]["label"] == "y"


def test_a_line_that_failed_has_its_error() -> None:
    body = {"model": "m", "input": "a"}
    message = "input[0]: got '99 tokens'; allowed: at most 64 tokens"
    response = answered("/v1/embeddings", body, None, reason=Reason.INVALID, message=message)
    assert response["status_code"] == 400
    assert response["body"]["error"]["param"] == "input[0]"


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/v1/embeddings", {"model": "m"}, "body.input"),
        ("/v1/embeddings", {"model": "m", "input": "a", "dimensions": 0}, "body.dimensions"),
        ("/v1/rerank", {"model": "m", "query": "q", "documents": []}, "body.documents"),
        ("/v1/classify", {"input": "a"}, "body.model"),
    ],
)
def test_malformed_lines_are_refused(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(LineRefused) as refused:
        line_endpoint(url).translate(body)
    assert refused.value.param == param

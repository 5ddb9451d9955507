"""Answers as JSON: OpenAI's embeddings, rankings as Jina and Cohere have them, any result."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.payload import json_form

from ....encoder_answers import Classes, Embeddings, Ranking

__all__ = [
    "CLASSIFY_ANSWER",
    "EMBEDDING_ANSWER",
    "INFER_ANSWER",
    "RERANK_ANSWER",
    "classify_object",
    "embedding_object",
    "infer_object",
    "rerank_object",
]

_COUNT = {"type": "integer", "minimum": 0}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": {"prompt_tokens": _COUNT, "total_tokens": _COUNT},
}


def _schema(entries: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["model", entries, "usage"],
        "properties": {
            "model": {"type": "string"},
            entries: {
                "type": "array",
                "items": {"type": "object", "required": list(entry), "properties": dict(entry)},
            },
            "usage": _USAGE,
        },
    }


EMBEDDING_ANSWER: Mapping[str, Any] = _schema(
    "data",
    {
        "object": {"const": "embedding"},
        "index": _COUNT,
        "embedding": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]
        },
    },
)
RERANK_ANSWER: Mapping[str, Any] = _schema(
    "results", {"index": _COUNT, "relevance_score": {"type": "number"}}
)
CLASSIFY_ANSWER: Mapping[str, Any] = _schema(
    "data",
    {
        "index": _COUNT,
        "label": {"type": "string"},
        "probs": {"type": "array", "items": {"type": "number"}},
        "num_classes": _COUNT,
    },
)
INFER_ANSWER: Mapping[str, Any] = {
    "type": "object",
    "required": ["id", "object", "model", "output"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "inference"},
        "model": {"type": "string"},
        "output": {},
    },
}


def embedding_object(model: str, own: Mapping[str, Any], value: object) -> bytes:
    """The answer of ``/v1/embeddings``.

    Raises:
        ProtocolError: another kind of model answered.
    """
    answer = Embeddings.of(value)
    if own.get("encoding_format") == "base64":
        shown = [b'"%b"' % base64.b64encode(packed) for packed in answer.packed]
    else:
        shown = [array.encode() for array in answer.json_arrays()]
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % pair for pair in enumerate(shown)
    )
    rest = _dump({"model": model, "usage": _usage(answer.tokens)})
    return b'{"object":"list","data":[' + data + b"]," + rest[1:]


def rerank_object(
    request_id: str, model: str, own: Mapping[str, Any], documents: list[str], value: object
) -> bytes:
    """The answer of ``/v1/rerank``.

    Raises:
        ProtocolError: another kind of model answered.
    """
    answer = Ranking.of(value)
    results = []
    for index in answer.order[: own.get("top_n")]:
        entry: dict[str, Any] = {"index": index, "relevance_score": answer.scores[index]}
        if own.get("return_documents"):
            entry["document"] = {"text": documents[index]}
        results.append(entry)
    return _dump(
        {"id": request_id, "model": model, "results": results, "usage": _usage(answer.tokens)}
    )


def classify_object(request_id: str, model: str, value: object) -> bytes:
    """The answer of ``/v1/classify``, as vLLM has it, and the names of all classes.

    Raises:
        ProtocolError: another kind of model answered.
    """
    answer = Classes.of(value)
    data = [
        {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
        for index, (label, probs) in enumerate(zip(answer.best, answer.probs, strict=True))
    ]
    return _dump(
        {
            "id": request_id,
            "object": "list",
            "model": model,
            "labels": answer.labels,
            "data": data,
            "usage": _usage(answer.tokens),
        }
    )


def infer_object(request_id: str, model: str, value: object) -> bytes:
    """The answer of ``/v1/infer``; bytes in it become text in base64.

    Raises:
        ProtocolError: it holds NaN or infinity, which JSON has not.
    """
    try:
        shown = json_form(value)
    except ValueError:
        raise ProtocolError("result", value, "a value without NaN and infinity") from None
    return _dump({"id": request_id, "object": "inference", "model": model, "output": shown})


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

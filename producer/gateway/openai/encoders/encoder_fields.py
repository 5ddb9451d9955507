"""Every field of ``/v1/embeddings``, ``/v1/rerank``, ``/v1/classify`` and ``/v1/infer``."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.fields.field_types import Flag, Integer

from ....encoder_answers import as_inputs, without_defaults
from ...api_errors import invalid
from ..fields.common_fields import TEXT
from ..fields.field_table import ApiField, FieldTable, Shape, no_effect, refused, served

__all__ = [
    "CLASSIFY_FIELDS",
    "EMBEDDING_FIELDS",
    "INFER_FIELDS",
    "RERANK_FIELDS",
    "classify_payload",
    "embedding_payload",
    "infer_payload",
    "rerank_payload",
]

_MAX_DIMENSIONS = 1 << 16
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_INPUT = Shape(
    "text, token ids, or a list of one of them",
    (str, list),
    {
        "anyOf": [
            {"type": "string"},
            _IDS,
            {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}},
        ]
    },
)
_DOCUMENTS = Shape(
    "a list of texts, or of objects with text",
    (list,),
    {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["text"]}]},
    },
)
_ANY = Shape("any JSON value", (object, bool), {})
_FORMATS = ("float", "base64")

_QUEUE: tuple[ApiField, ...] = (
    served("model", TEXT, "Which model; `GET /v1/models` lists those that are served."),
    served(
        "service_tier",
        TEXT,
        "`priority` and `fast` use the lane critical, `flex` the lane batch, others normal.",
    ),
    served(
        "priority",
        Integer(-(2**31), 2**31 - 1),
        "Below 0 uses the lane critical, above 0 the lane batch, unless `service_tier` is given.",
    ),
    no_effect("user", TEXT, "Who pays is decided by the API key."),
)
_COMMON: tuple[ApiField, ...] = (
    *_QUEUE,
    served("truncate", Flag(), "Cut what is longer than the model's limit; else it is refused."),
    refused("truncate_prompt_tokens", "is not served: see truncate"),
    refused("add_special_tokens", "is not served: the tokenizer decides", True),
)

EMBEDDING_FIELDS = FieldTable(
    (
        served("input", _INPUT, "A text, a list of texts, token ids, or a list of such lists."),
        served("encoding_format", TEXT, "`float`, or `base64` of little-endian float32."),
        served(
            "dimensions",
            Integer(1, _MAX_DIMENSIONS),
            "How many numbers to keep; what was of length 1 is brought to length 1 again.",
        ),
        served("normalize", Flag(), "Length 1 in any case, not only where the checkpoint says so."),
        served("prompt_name", TEXT, "A prompt of the checkpoint to put before each text."),
        *_COMMON,
    ),
    prompt="input",
)

RERANK_FIELDS = FieldTable(
    (
        served("query", TEXT, "What the documents shall answer."),
        served("documents", _DOCUMENTS, "Texts, or objects whose `text` counts."),
        served("top_n", Integer(1, 1 << 20), "How many to answer, best first; all by default."),
        served("return_documents", Flag(), "Repeat the documents in the answer."),
        *_COMMON,
        refused("rank_fields", "is not served: the field text counts", ["text"]),
        refused("max_chunks_per_doc", "is not served: see truncate"),
        refused("max_tokens_per_doc", "is not served: see truncate"),
    ),
    prompt="documents",
    required=("model", "query", "documents"),
)

CLASSIFY_FIELDS = FieldTable(
    (
        served(
            "input",
            _INPUT,
            "As for embeddings; a list of two texts inside the list is a pair that is read "
            "together.",
        ),
        *_COMMON,
    ),
    prompt="input",
)

INFER_FIELDS = FieldTable(
    (
        served("input", _ANY, "The payload, as the batcher's `infer` gets it."),
        served("input_base64", TEXT, "In place of `input`: a payload of bytes, in base64."),
        *_QUEUE,
    ),
    prompt="input",
    required=("model",),
    either=("input", "input_base64"),
)


def embedding_payload(own: Mapping[str, Any]) -> dict[str, Any]:
    """The payload for an embedder.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    if own.get("encoding_format", "float") not in _FORMATS:
        raise invalid("encoding_format", f"encoding_format: allowed are {', '.join(_FORMATS)}")
    return without_defaults(
        input=_input(own),
        dimensions=own.get("dimensions"),
        normalize=own.get("normalize"),
        prompt_name=own.get("prompt_name"),
        truncate=own.get("truncate"),
    )


def rerank_payload(own: Mapping[str, Any]) -> dict[str, Any]:
    """The payload for a reranker.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    if "query" not in own:
        raise invalid("query", "query: give a text", "missing_value")
    if not own.get("documents"):
        raise invalid("documents", "documents: give at least one text", "missing_value")
    documents = [
        _document(document, f"documents[{number}]")
        for number, document in enumerate(own["documents"])
    ]
    return without_defaults(query=own["query"], documents=documents, truncate=own.get("truncate"))


def classify_payload(own: Mapping[str, Any]) -> dict[str, Any]:
    """The payload for a classifier.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    return without_defaults(input=_input(own), truncate=own.get("truncate"))


def infer_payload(own: Mapping[str, Any]) -> Any:
    """The payload for a batcher of a user's own.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    if ("input" in own) == ("input_base64" in own):
        raise invalid("input", "input: give either input or input_base64", "missing_value")
    if "input" in own:
        return own["input"]
    try:
        return base64.b64decode(own["input_base64"], validate=True)
    except ValueError:
        raise invalid("input_base64", "input_base64: is not base64") from None


def _input(own: Mapping[str, Any]) -> list[Any]:
    if "input" not in own or own["input"] == []:
        raise invalid("input", "input: give text or token ids", "missing_value")
    return as_inputs(own["input"])


def _document(document: object, where: str) -> str:
    text = document.get("text") if isinstance(document, Mapping) else document
    if not isinstance(text, str):
        raise invalid(where, f"{where}: a document is a text, or an object with text")
    return text

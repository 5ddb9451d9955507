"""Writes what OpenAI's API answers and takes, by the types of the installed ``openai``.

    .venv/bin/python scripts/pin_openai_schemas.py > tests/gateway/openai_schemas.json

Tests of the gateway read that file, so they mean one version, whichever is installed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from openai.types import (
    Batch,
    Completion,
    CreateEmbeddingResponse,
    EmbeddingCreateParams,
    FileObject,
    Model,
    completion_create_params,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

FORMS: dict[str, Any] = {
    "batch": Batch,
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "embeddings": CreateEmbeddingResponse,
    "event": ResponseStreamEvent,
    "file": FileObject,
    "model": Model,
    "response": Response,
    "text_completion": Completion,
}
FIELDS: dict[str, Any] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "embeddings": EmbeddingCreateParams,
    "responses": response_create_params.ResponseCreateParamsBase,
}
_PROSE = {"title", "description", "examples", "deprecated"}


def without_prose(schema: Any, *, names: bool = False) -> Any:
    """The schema without texts; ``names``: its keys are names, and all of them stay."""
    if isinstance(schema, list):
        return [without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_prose(value, names=not names and key in {"properties", "$defs"})
        for key, value in schema.items()
        if names or key not in _PROSE
    }


def main() -> None:
    """Write the file to standard output."""
    asked: list[tuple[str, Any, TypeAdapter[Any]]] = [
        (name, "validation", TypeAdapter(form)) for name, form in FORMS.items()
    ]
    forms, shared = TypeAdapter.json_schemas(asked)
    pinned = {
        "openai": openai.__version__,
        "$defs": without_prose(shared["$defs"], names=True),
        "forms": {name: without_prose(forms[name, "validation"]) for name in FORMS},
        "fields": {name: sorted(params.__annotations__) for name, params in FIELDS.items()},
    }
    # A line for each definition, so that versions can be compared.
    parts = []
    for name, value in pinned.items():
        if isinstance(value, dict):
            lines = (f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in value.items())
            parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    sys.stdout.write("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()

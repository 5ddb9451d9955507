"""Whether what the gateway sends has the form of OpenAI's API, by a pinned version of its types.

``scripts/pin_openai_schemas.py`` writes ``openai_schemas.json``.
"""

from __future__ import annotations

import base64
import json
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

__all__ = ["check_body", "check_event", "pinned"]


@cache
def pinned() -> dict[str, Any]:
    """The pinned types: ``openai``, ``forms``, ``fields``, ``$defs``."""
    path = Path(__file__).with_name("openai_schemas.json")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@cache
def _validator(form: str) -> Any:
    return jsonschema_rs.validator_for({**pinned()["forms"][form], "$defs": pinned()["$defs"]})


def check_event(data: dict[str, Any]) -> None:
    """Check the data of a server-sent event.

    Raises:
        AssertionError: OpenAI's API sends no such event.
    """
    if "type" in data and "object" not in data and "error" not in data:
        _check("event", data)
    else:
        check_body(data)


def check_body(data: Any) -> None:
    """Check a JSON body; one of a form that OpenAI's API does not have passes.

    Raises:
        AssertionError: OpenAI's API gives no such body.
    """
    if not isinstance(data, dict):
        return
    if isinstance(data.get("error"), dict) and "object" not in data:
        _check_error(data["error"])
        return
    form = data.get("object")
    if form == "text_completion":
        data = {**data, "choices": [_as_typed(choice) for choice in data["choices"]]}
    if form == "list" and any("embedding" in item for item in data.get("data", ())):
        items = [{**item, "embedding": _numbers(item["embedding"])} for item in data["data"]]
        _check("embeddings", {**data, "data": items})
    elif form == "list":
        for item in data.get("data", ()):
            check_body(item)
    elif form in pinned()["forms"] and not data.get("deleted"):
        _check(form, data)


def _check(form: str, data: dict[str, Any]) -> None:
    wrong = next(_validator(form).iter_errors(data), None)
    assert wrong is None, f"no {form}: {wrong}\n{json.dumps(data)[:2000]}"


def _numbers(embedding: Any) -> Any:
    """Those of a vector in base64, which the types do not know."""
    if not isinstance(embedding, str):
        return embedding
    return list(array("f", base64.b64decode(embedding, validate=True)))


def _check_error(error: dict[str, Any]) -> None:
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert error["message"], error
    assert all(isinstance(error[name], str) for name in ("message", "type", "code")), error
    assert error["param"] is None or isinstance(error["param"], str), error


def _as_typed(choice: dict[str, Any]) -> dict[str, Any]:
    """A completion's choice without what the API sends and its types do not know.

    In a stream the reason comes with the last event; an echo's first token has no log-probability.
    """
    choice = {**choice, "finish_reason": choice["finish_reason"] or "stop"}
    if found := choice.get("logprobs"):
        values = [0.0 if value is None else value for value in found["token_logprobs"]]
        tops = [top or {} for top in found["top_logprobs"] or ()]
        choice["logprobs"] = {**found, "token_logprobs": values, "top_logprobs": tops}
    return choice

"""Every field of ``POST /v1/completions``, and the request that a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.field_types import Flag, Integer

from ...api_errors import invalid
from .common_fields import COMMON_FIELDS, OBJECT, output_form
from .field_table import FieldTable, Shape, option, refused, served

__all__ = ["COMPLETION_FIELDS", "completion_request", "echoed_text"]

_DEFAULT_MAX_TOKENS = 16

COMPLETION_FIELDS = FieldTable(
    (
        served(
            "prompt",
            Shape(
                "text, token ids, or a list of one of them",
                (str, list),
                {"oneOf": [{"type": "string"}, {"type": "array"}]},
            ),
            "Text, a list of texts, token ids, or a list of lists of token ids.",
        ),
        *COMMON_FIELDS,
        option("max_tokens", effect="Most output tokens; the default is 16."),
        option("best_of"),
        served("echo", Flag(), "Begin the answer with the prompt's text."),
        served(
            "logprobs",
            Integer(0, 20),
            "How many of the most likely tokens to report, with log-probabilities.",
        ),
        served("response_format", OBJECT, "`text`, `json_object`, or `json_schema`."),
        refused("suffix", "is not served: no model here fills in the middle", ""),
        refused("prompt_embeds", "is not served"),
        refused("prompt_logprobs", "is not served; see echo with logprobs"),
        refused("add_special_tokens", "is not served: the tokenizer decides", True),
    ),
    prompt="prompt",
)


def completion_request(own: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the queue's request, prompt included.

    Args:
        own: values that the endpoint reads, see :meth:`FieldTable.read`.
        values: values of the queue's request.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    fields = {"max_tokens": _DEFAULT_MAX_TOKENS, **values, **output_form(own)}
    fields["prompt"] = _prompt(own.get("prompt"))
    if own.get("logprobs") is not None:
        fields["logprobs"] = own["logprobs"]
    return fields


def _prompt(prompt: Any) -> Any:
    if not prompt:
        raise invalid("prompt", "prompt: give text or token ids", "missing_value")
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise invalid("prompt", "prompt: one prompt a request", "unsupported_value")
        return prompt[0]
    return prompt


def echoed_text(own: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """The text that stands before a completion.

    Raises:
        ApiError: 400, the prompt's text is not known, or its log-probabilities are asked for.
    """
    if not own.get("echo"):
        return ""
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        raise invalid("echo", "echo: needs a prompt given as text", "unsupported_value")
    if "logprobs" in fields:
        raise invalid("echo", "echo: is not served together with logprobs", "unsupported_value")
    return prompt

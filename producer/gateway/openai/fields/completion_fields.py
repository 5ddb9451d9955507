"""Every field of ``POST /v1/completions``, and the request that a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.fields.field_types import Flag, Integer

from ...api_errors import invalid
from .common_fields import COMMON_FIELDS, OBJECT, output_form
from .field_table import FieldTable, Shape, option, refused, served

__all__ = [
    "COMPLETION_FIELDS",
    "completion_request",
    "completion_requests",
    "echoed_text",
    "needs_prompt_tokens",
]

_DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256

COMPLETION_FIELDS = FieldTable(
    (
        served(
            "prompt",
            Shape(
                "text, token ids, or a list of one of them",
                (str, list),
                {"oneOf": [{"type": "string"}, {"type": "array"}]},
            ),
            f"Text, token ids, or a list of up to {MAX_PROMPTS} of one of them; a stream has one.",
        ),
        *COMMON_FIELDS,
        option("max_tokens", effect="Most output tokens; the default is 16."),
        option("best_of"),
        served(
            "echo",
            Flag(),
            "Begin the answer with the prompt's text, and its tokens' log-probabilities if "
            "`logprobs` asks for them.",
        ),
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
    (fields,) = completion_requests(own, values, 1)
    return fields


def completion_requests(
    own: Mapping[str, Any], values: Mapping[str, Any], most: int = MAX_PROMPTS
) -> list[dict[str, Any]]:
    """The same for a body with up to ``most`` prompts: one request for each.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    fields = {"max_tokens": _DEFAULT_MAX_TOKENS, **values, **output_form(own)}
    if own.get("logprobs") is not None:
        fields["logprobs"] = own["logprobs"]
        if own.get("echo"):
            fields["prompt_logprobs"] = own["logprobs"]
    prompts = _prompts(own.get("prompt"))
    if len(prompts) > most:
        wanted = "one prompt" if most == 1 else f"at most {most} prompts"
        raise invalid("prompt", f"prompt: {wanted} a request", "unsupported_value")
    if len(prompts) > 1 and own.get("stream"):
        message = "stream: a stream has one prompt; ask for several without stream"
        raise invalid("stream", message, "unsupported_value")
    return [{**fields, "prompt": prompt} for prompt in prompts]


def _prompts(prompt: Any) -> list[Any]:
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts = prompt if several else [prompt]
    if not all(isinstance(one, str | list) and one for one in prompts):
        raise invalid("prompt", "prompt: give text or token ids", "missing_value")
    for number, one in enumerate(prompts):
        if isinstance(one[0], dict):  # the queue would take it for a conversation
            where = f"prompt[{number}][0]" if several else "prompt[0]"
            raise invalid(where, f"{where}: a token id is a whole number")
    return prompts


def needs_prompt_tokens(own: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Whether the echo of a prompt shows what only the tokenizer knows."""
    return bool(own.get("echo")) and ("logprobs" in fields or not isinstance(fields["prompt"], str))


def echoed_text(own: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """The text that stands before a completion, where it needs no tokenizer.

    Raises:
        ApiError: 400, it does.
    """
    if not own.get("echo"):
        return ""
    if needs_prompt_tokens(own, fields):
        message = "echo: needs a prompt given as text here, and no logprobs"
        raise invalid("echo", message, "unsupported_value")
    return str(fields["prompt"])

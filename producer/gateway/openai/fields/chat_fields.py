"""Every field of ``POST /v1/chat/completions``, and the request that a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.fields.field_types import Flag, Integer

from ...api_errors import invalid
from .common_fields import COMMON_FIELDS, OBJECT, TEXT, output_form
from .field_table import FieldTable, Shape, no_effect, option, refused, served

__all__ = ["CHAT_FIELDS", "chat_request"]

_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"type": ["string", "null"]},
        },
    },
}

CHAT_FIELDS = FieldTable(
    (
        served(
            "messages",
            Shape("a list of messages", (list,), _MESSAGES),
            "The conversation, with OpenAI's keys; content is text or parts of type `text`.",
        ),
        *COMMON_FIELDS,
        option("max_completion_tokens", "max_tokens"),
        served(
            "max_tokens",
            Integer(1, 1 << 17),
            "The older name of the same; both may stand only if equal. "
            "The default is `gateway.default_max_tokens`.",
        ),
        served("logprobs", Flag(), "Report log-probabilities of the output tokens."),
        served(
            "top_logprobs",
            Integer(0, 20),
            "How many of the most likely tokens to report at each position. Needs logprobs.",
        ),
        served("response_format", OBJECT, "`text`, `json_object`, or `json_schema`."),
        option("tools"),
        option("tool_choice"),
        option("parallel_tool_calls"),
        option("reasoning_effort"),
        option("chat_template_kwargs"),
        no_effect("metadata", OBJECT, "Answers are not stored."),
        no_effect("safety_identifier", TEXT, "There is no moderation."),
        no_effect("prompt_cache_key", TEXT, "Prefixes are cached by their content."),
        no_effect("prompt_cache_retention", TEXT, "Prefixes are cached by their content."),
        no_effect("prompt_cache_options", OBJECT, "Prefixes are cached by their content."),
        refused("store", "is not served; /v1/responses stores answers", False),
        refused("modalities", "allowed is text alone", ["text"]),
        refused("verbosity", "is not served: no model here knows it", "medium"),
        refused("audio", "is not served"),
        refused("prediction", "is not served; drafts come from the text itself"),
        refused("moderation", "is not served"),
        refused("web_search_options", "is not served"),
        refused("functions", "is deprecated: use tools", []),
        refused("function_call", "is deprecated: use tool_choice", "none", "auto"),
        refused("add_generation_prompt", "is not served: it is always true", True),
        refused("continue_final_message", "is not served", False),
        refused("echo", "is not served for chat", False),
        refused("documents", "is not served"),
        refused("chat_template", "is not served: the model's own is used"),
        refused("mm_processor_kwargs", "is not served"),
        refused("add_special_tokens", "is not served for chat", False),
        refused("include_reasoning", "is not served", True),
    ),
    prompt="messages",
)


def chat_request(
    own: Mapping[str, Any], values: Mapping[str, Any], default_max_tokens: int
) -> dict[str, Any]:
    """The fields of the queue's request, prompt included.

    Args:
        own: values that the endpoint reads, see :meth:`FieldTable.read`.
        values: values of the queue's request.
        default_max_tokens: where the body names none.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    fields = {**values, "prompt": read_messages(own)}
    fields["parse_response"] = True
    most = fields.setdefault("max_tokens", own.get("max_tokens", default_max_tokens))
    if own.get("max_tokens", most) != most:
        message = f"max_tokens: max_completion_tokens is {most}; give one of them"
        raise invalid("max_tokens", message)
    fields.update(output_form(own))
    _read_logprobs(own, fields)
    return fields


def read_messages(own: Mapping[str, Any]) -> list[Any]:
    """The conversation, which the queue's request checks further.

    Raises:
        ApiError: 400, it is none: the queue would take numbers for token ids.
    """
    messages: list[Any] = own.get("messages") or []
    if not messages:
        raise invalid("messages", "messages: give at least one message", "missing_value")
    if not isinstance(messages[0], dict):
        raise invalid("messages[0]", "messages[0]: a message is an object with role and content")
    return messages


def _read_logprobs(own: Mapping[str, Any], fields: dict[str, Any]) -> None:
    if own.get("logprobs"):
        fields["logprobs"] = own.get("top_logprobs", 0)
    elif own.get("top_logprobs"):
        raise invalid("top_logprobs", "top_logprobs: allowed only with logprobs true")

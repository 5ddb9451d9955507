"""Every field of ``POST /v1/responses``, and the request that a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.fields.field_types import FieldType, Flag

from ..api_errors import invalid
from ..openai.fields.common_fields import FORM_MEMBERS, LIST, OBJECT, TEXT
from ..openai.fields.field_table import FieldTable, Shape, no_effect, option, refused, served
from ..openai.fields.members import check_members
from .response_tools import echoed_tools, tool_options

__all__ = ["RESPONSE_FIELDS", "echoed_fields", "response_request"]

_MAX_METADATA = 16

RESPONSE_FIELDS = FieldTable(
    (
        served(
            "input",
            Shape(
                "text or a list of items",
                (str, list),
                {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            ),
            "Text, or items: `message` with text, `reasoning`, `function_call`, "
            "`function_call_output`.",
        ),
        served("model", TEXT, "Which model; `GET /v1/models` lists those that are served."),
        served("instructions", TEXT, "A system message before the conversation, this time only."),
        served("previous_response_id", TEXT, "Continue the conversation of a stored response."),
        served("stream", Flag(), "Send the response as server-sent events."),
        served("stream_options", OBJECT, "`include_obfuscation` has no effect."),
        served("background", Flag(), "Answer at once; the response is read later. Needs `store`."),
        served("store", Flag(), "Keep the response for `gateway.response_retention_s`; true."),
        served("metadata", OBJECT, "At most 16 pairs of text, given back with the response."),
        served("text", OBJECT, "`format`: `text`, `json_object`, or `json_schema`."),
        served(
            "service_tier",
            TEXT,
            "`priority` and `fast` use the lane critical, `flex` the lane batch, others normal.",
        ),
        served("tools", LIST, "Functions that the model may call; others are refused."),
        served(
            "tool_choice",
            Shape("a word or an object", (str, dict), {"type": ["string", "object"]}),
            "`auto`, `none`, `required`, or a function by its name.",
        ),
        served("parallel_tool_calls", Flag(), "Whether a response may call several functions."),
        served("reasoning", OBJECT, "`effort`: as `reasoning_effort` of chat."),
        option("max_output_tokens", "max_tokens"),
        option("temperature"),
        option("top_p"),
        no_effect("user", TEXT, "Who pays is decided by the API key."),
        no_effect("safety_identifier", TEXT, "There is no moderation."),
        no_effect("prompt_cache_key", TEXT, "Prefixes are cached by their content."),
        no_effect("prompt_cache_options", OBJECT, "Prefixes are cached by their content."),
        no_effect("prompt_cache_retention", TEXT, "Prefixes are cached by their content."),
        refused("truncation", "allowed is disabled: no conversation is cut", "disabled"),
        refused("max_tool_calls", "is not served: no tool runs here"),
        refused("include", "is not served", []),
        refused("top_logprobs", "is not served here; /v1/chat/completions serves it", 0),
        refused("conversation", "is not served: use previous_response_id"),
        refused("prompt", "is not served: templates of prompts are the client's"),
        refused("context_management", "is not served"),
        refused("moderation", "is not served"),
    ),
    prompt="input",
    names={"json_schema": "text.format", "reasoning_effort": "reasoning.effort"},
)

_FORMATS: Mapping[str, Mapping[str, FieldType]] = {
    "text": {"type": TEXT},
    "json_object": {"type": TEXT},
    "json_schema": {"type": TEXT, **FORM_MEMBERS},
}


def response_request(
    own: Mapping[str, Any],
    values: Mapping[str, Any],
    messages: list[dict[str, Any]],
    default_max_tokens: int,
) -> dict[str, Any]:
    """The fields of the queue's request, prompt included.

    Args:
        own: values that the endpoint reads, see :meth:`FieldTable.read`.
        values: values of the queue's request.
        messages: the conversation.
        default_max_tokens: where the body names none.

    Raises:
        ApiError: 400, with the name of the field at fault.
    """
    fields = dict(values)
    instructions = own.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    fields["prompt"] = [*system, *messages]
    fields["parse_response"] = True
    fields.setdefault("max_tokens", default_max_tokens)
    fields.update(tool_options(own))
    _check_metadata(own.get("metadata"))
    _check_stream_options(own)
    if own.get("background") and own.get("store") is False:
        raise invalid("background", "background: needs store true")
    schema = _schema(own.get("text") or {})
    if schema is not None:
        fields["json_schema"] = schema
    return fields


def echoed_fields(own: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a response object says of its request, without what was not given."""
    names = ("instructions", "previous_response_id", "metadata", "text", "background", "store")
    echoed = {name: own[name] for name in names if own.get(name) is not None}
    echoed |= echoed_tools(own)
    for name, target in (
        ("max_output_tokens", "max_tokens"), ("temperature", "temperature"), ("top_p", "top_p"),
    ):  # fmt: skip
        if target in values:
            echoed[name] = values[target]
    return echoed


def _schema(text: Mapping[str, Any]) -> Any:
    check_members("text", text, {"format": OBJECT, "verbosity": TEXT})
    if text.get("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity", "text.verbosity: is not served", "unsupported_parameter")
    form = text.get("format")
    if form is None:
        return None
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise invalid("text.format.type", f"text.format.type: allowed are {', '.join(_FORMATS)}")
    check_members("text.format", form, _FORMATS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if form.get("schema") is None:
        raise invalid("text.format.schema", "text.format.schema: give a JSON Schema")
    return form["schema"]


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    if metadata is None:
        return
    right = len(metadata) <= _MAX_METADATA and all(
        len(name) <= 64 and isinstance(value, str) and len(value) <= 512
        for name, value in metadata.items()
    )
    if not right:
        message = (
            f"metadata: at most {_MAX_METADATA} pairs of text, names of at most 64 and values of "
            "at most 512 characters"
        )
        raise invalid("metadata", message)


def _check_stream_options(own: Mapping[str, Any]) -> None:
    options = own.get("stream_options")
    if options is None:
        return
    if not own.get("stream"):
        raise invalid("stream_options", "stream_options: allowed only with stream true")
    check_members("stream_options", options, {"include_obfuscation": Flag()})

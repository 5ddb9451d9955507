"""The fields that chat and completions share, and what becomes of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.fields.field_types import FieldType, Flag, Integer, Name
from penstock.shared.protocol.states import Lane

from ...api_errors import invalid
from .field_table import ApiField, Shape, no_effect, option, refused, served
from .members import check_members

__all__ = ["COMMON_FIELDS", "FORM_MEMBERS", "output_form", "service_tier", "wants_usage"]

_MAX_SEED = 2**63 - 1

OBJECT = Shape("an object", (dict,), {"type": "object"})
LIST = Shape("a list", (list,), {"type": "array"})
TEXT = Shape("text", (str,), {"type": "string"})


def _seed(value: object) -> object:
    """OpenAI's seeds may be negative: the same 63 bits."""
    if isinstance(value, int) and not isinstance(value, bool) and -_MAX_SEED <= value <= _MAX_SEED:
        return value & _MAX_SEED
    return value


def _top_k(value: object) -> object:
    """Clients of vLLM say -1 for all tokens."""
    return 0 if value == -1 and not isinstance(value, bool) else value


COMMON_FIELDS: tuple[ApiField, ...] = (
    served("model", TEXT, "Which model; `GET /v1/models` lists those that are served."),
    served("stream", Flag(), "Send the answer as server-sent events."),
    served(
        "stream_options",
        OBJECT,
        "`include_usage`: a last event with the token counts; with `continuous_usage_stats` every "
        "event has those so far. `include_obfuscation` has no effect.",
    ),
    option("temperature"),
    option("top_p"),
    option("presence_penalty"),
    option("frequency_penalty"),
    option("logit_bias"),
    option("seed", convert=_seed, effect="The same seed and request give the same tokens."),
    option("stop"),
    option("n"),
    option("top_k", convert=_top_k, effect="Keep the k most likely tokens; 0 and -1 keep all."),
    option("min_p"),
    option("repetition_penalty"),
    option("min_tokens"),
    option("stop_token_ids"),
    option("ignore_eos"),
    option("allowed_token_ids"),
    served(
        "service_tier",
        TEXT,
        "`priority` and `fast` use the lane critical, `flex` the lane batch, `auto`, `default` and "
        "`scale` the lane normal. The answer names the tier that was used.",
    ),
    served(
        "priority",
        Integer(-(2**31), 2**31 - 1),
        "Below 0 uses the lane critical, above 0 the lane batch, unless `service_tier` is given.",
    ),
    served("return_token_ids", Flag(), "Add `token_ids` to every choice, in events the new ones."),
    served(
        "structured_outputs",
        OBJECT,
        "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar` (Lark).",
    ),
    served("guided_json", Shape("a JSON Schema", (dict, str), {}), "As `structured_outputs.json`."),
    served("guided_regex", TEXT, "As `structured_outputs.regex`."),
    served(
        "guided_choice",
        Shape("a list of texts", (list,), {"type": "array", "items": {"type": "string"}}),
        "As `structured_outputs.choice`.",
    ),
    served("guided_grammar", TEXT, "As `structured_outputs.grammar`."),
    no_effect("user", TEXT, "Who pays is decided by the API key."),
    refused("cache_salt", "is not served; `engine.salt_by_tenant` keeps tenants' caches apart"),
    refused("use_beam_search", "is not served here; `penstock submit --beam-width` is", False),
    refused("length_penalty", "belongs to beam search, which is not served here", 1, 1.0),
    refused("early_stopping", "belongs to beam search, which is not served here", False),
    refused("include_stop_str_in_output", "is not served: a stop text is never shown", False),
    refused("skip_special_tokens", "is not served: special tokens are never shown", True),
    refused("spaces_between_special_tokens", "is not served", True, False),
    refused("truncate_prompt_tokens", "is not served: no prompt is cut"),
    refused("logits_processors", "is not served: no code is run for clients"),
    refused("guided_decoding_backend", "is not served: there is one backend"),
    refused("guided_whitespace_pattern", "is not served"),
    refused("kv_transfer_params", "is not served"),
    refused("vllm_xargs", "is not served"),
    refused("request_id", "is not served: send an Idempotency-Key header"),
    refused("return_tokens_as_token_ids", "is not served; see return_token_ids", False),
)

FORM_MEMBERS: Mapping[str, FieldType] = {
    "name": Name(re.compile(r"[A-Za-z0-9_-]{1,64}"), "1 to 64 characters of A-Z a-z 0-9 _ -"),
    "description": TEXT,
    "schema": OBJECT,
    "strict": Flag(),
}
"""What a form of the output by JSON Schema may say of itself. Every one is followed strictly."""

_STREAM_OPTIONS = dict.fromkeys(
    ("include_usage", "include_obfuscation", "continuous_usage_stats"), Flag()
)

_TIERS: Mapping[str, tuple[Lane, str]] = {
    "auto": (Lane.NORMAL, "default"),
    "default": (Lane.NORMAL, "default"),
    "scale": (Lane.NORMAL, "default"),
    "priority": (Lane.CRITICAL, "priority"),
    "fast": (Lane.CRITICAL, "priority"),
    "flex": (Lane.BATCH, "flex"),
}


def service_tier(own: Mapping[str, Any]) -> tuple[Lane, str]:
    """The lane of a request, and the tier that its answer names.

    Raises:
        ApiError: 400, no such tier.
    """
    tier = own.get("service_tier")
    if tier is None:
        priority = own.get("priority", 0)
        tier = "priority" if priority < 0 else "flex" if priority else "default"
    if tier not in _TIERS:
        raise invalid("service_tier", f"service_tier: allowed are {', '.join(_TIERS)}")
    return _TIERS[tier]


def wants_usage(own: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the stream ends with an event of token counts, and whether all events have them.

    Raises:
        ApiError: 400, options of a stream without a stream, or unknown ones.
    """
    options = own.get("stream_options")
    if options is None:
        return False, False
    if not own.get("stream"):
        raise invalid("stream_options", "stream_options: allowed only with stream true")
    check_members("stream_options", options, _STREAM_OPTIONS)
    usage = bool(options.get("include_usage"))
    return usage, usage and bool(options.get("continuous_usage_stats"))


_RESPONSE_FORMATS: Mapping[str, Mapping[str, FieldType | None]] = {
    "text": {"type": TEXT},
    "json_object": {"type": TEXT},
    "json_schema": {"type": TEXT, "json_schema": OBJECT},
}
_FORMS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_ANY_OBJECT = '{"type":"object"}'


def output_form(own: Mapping[str, Any]) -> dict[str, Any]:
    """The option that constrains the form of the output, and its value; empty without one.

    Raises:
        ApiError: 400, there are two, or one is malformed.
    """
    given: list[tuple[str, str, Any]] = []
    if (form := own.get("response_format")) is not None:
        given += _response_format(form)
    if (outputs := own.get("structured_outputs")) is not None:
        given += _structured_outputs(outputs)
    given += [
        (f"guided_{word}", target, own[f"guided_{word}"])
        for word, target in _FORMS.items()
        if own.get(f"guided_{word}") is not None
    ]
    if len(given) > 1:
        raise invalid(given[1][0], f"{given[1][0]}: at most one; {given[0][0]} is given, too")
    for name, target, value in given:
        if target == "choice" and not value:
            raise invalid(name, f"{name}: give at least one text to choose from")
    return {target: value for _, target, value in given}


def _structured_outputs(outputs: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    check_members("structured_outputs", outputs, {"json_object": Flag(), **dict.fromkeys(_FORMS)})
    given = []
    for name, value in outputs.items():
        where = f"structured_outputs.{name}"
        if name == "json_object":
            if value:
                given.append((where, "json_schema", _ANY_OBJECT))
        elif value is not None:
            given.append((where, _FORMS[name], value))
    return given


def _response_format(form: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    kind, where = form.get("type"), "response_format"
    if not isinstance(kind, str) or kind not in _RESPONSE_FORMATS:
        path = f"{where}.type"
        raise invalid(path, f"{path}: allowed are {', '.join(_RESPONSE_FORMATS)}")
    check_members(where, form, _RESPONSE_FORMATS[kind])
    if kind == "text":
        return []
    if kind == "json_object":
        return [(where, "json_schema", _ANY_OBJECT)]
    named, where = form.get("json_schema") or {}, f"{where}.json_schema"
    check_members(where, named, FORM_MEMBERS)
    if named.get("schema") is None:
        raise invalid(f"{where}.schema", f"{where}.schema: give a JSON Schema as an object")
    return [(where, "json_schema", named["schema"])]

"""The reference of all fields, written from their declarations."""

from __future__ import annotations

from ...responses.response_fields import RESPONSE_FIELDS
from ..encoders.encoder_fields import (
    CLASSIFY_FIELDS,
    EMBEDDING_FIELDS,
    INFER_FIELDS,
    RERANK_FIELDS,
)
from .chat_fields import CHAT_FIELDS
from .completion_fields import COMPLETION_FIELDS
from .field_table import ApiField, FieldTable, Kind

__all__ = ["render_fields"]

_INTRODUCTION = """\
# Fields of the gateway's requests

Written by `python -m penstock.producer.gateway.openai.fields > docs/gateway-fields.md`; do not
edit by hand.

A field that is not listed here is refused by name, with 400 and `param`. A refused field is
accepted with the values named here, which ask for nothing. `null` counts as not given.
"""


def render_fields() -> str:
    """Return the reference in Markdown."""
    chat = _table("POST /v1/chat/completions", CHAT_FIELDS)
    completions = _table("POST /v1/completions", COMPLETION_FIELDS)
    responses = _table("POST /v1/responses", RESPONSE_FIELDS)
    encoders = (
        _table("POST /v1/embeddings", EMBEDDING_FIELDS),
        _table("POST /v1/rerank", RERANK_FIELDS),
        _table("POST /v1/classify", CLASSIFY_FIELDS),
        _table("POST /v1/infer", INFER_FIELDS),
    )
    return "\n".join((_INTRODUCTION, chat, completions, responses, *encoders))


def _table(title: str, table: FieldTable) -> str:
    kinds = (Kind.SERVED, Kind.NO_EFFECT, Kind.REFUSED)
    rows = [_row(f) for kind in kinds for f in table.fields.values() if f.kind is kind]
    return "\n".join([f"## `{title}`\n", "| Field | | |", "|---|---|---|", *rows, ""])


def _row(field: ApiField) -> str:
    effect = field.effect
    if field.neutral:
        effect += "; accepted: " + ", ".join(f"`{_shown(value)}`" for value in field.neutral)
    return f"| `{field.name}` | {field.kind} | {effect} |"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')

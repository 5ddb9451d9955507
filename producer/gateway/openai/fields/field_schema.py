"""JSON Schemas of fields, for ``/openapi.json``, from the same declarations as their validation."""

from __future__ import annotations

from typing import Any

from penstock.shared.protocol.fields.collection_types import Biases, JsonSchema, Texts, TokenIds
from penstock.shared.protocol.fields.field_types import (
    FieldType,
    Flag,
    FlagOrWord,
    Integer,
    Number,
    Text,
    Word,
)

from .field_table import ApiField, FieldTable, Kind, Shape

__all__ = ["body_schema"]


def body_schema(table: FieldTable) -> dict[str, Any]:
    """The schema of an endpoint's body, without the fields that are refused."""
    fields = [field for field in table.fields.values() if field.kind is not Kind.REFUSED]
    schema: dict[str, Any] = {
        "type": "object",
        "required": list(table.required),
        "properties": {field.name: _property(field) for field in fields},
        "additionalProperties": False,
    }
    if table.either:
        given = {"not": {"type": "null"}}
        schema["oneOf"] = [
            {"required": [name], "properties": {name: given}} for name in table.either
        ]
    return schema


def _property(field: ApiField) -> dict[str, Any]:
    schema = {} if field.type is None else _schema(field.type)
    if field.name in ("model", "messages", "prompt"):
        return {**schema, "description": field.effect}
    if not schema:
        return {"description": field.effect}
    return {"anyOf": [schema, {"type": "null"}], "description": field.effect}


def _schema(kind: FieldType) -> dict[str, Any]:
    match kind:
        case Shape():
            return dict(kind.schema)
        case Integer():
            return {"type": "integer", "minimum": kind.low, "maximum": kind.high}
        case Number():
            low = "exclusiveMinimum" if kind.above_low else "minimum"
            return {"type": "number", low: kind.low, "maximum": kind.high}
        case Flag():
            return {"type": "boolean"}
        case FlagOrWord():
            return {"enum": [True, False, kind.word]}
        case Word():
            return {"type": "string", "enum": [member.value for member in kind.members]}
        case Text():
            return {"type": "string", "minLength": 1}
        case Texts():
            one = {"type": "string", "minLength": 1, "maxLength": kind.max_bytes}
            several = {"type": "array", "items": one, "maxItems": kind.max_items}
            return {"anyOf": [one, several]}
        case TokenIds():
            ids = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
            return {"type": "array", "items": ids, "maxItems": kind.max_items}
        case Biases():
            bias = {"type": "number", "minimum": -kind.bound, "maximum": kind.bound}
            return {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": bias,
                "maxProperties": kind.max_items,
            }
        case JsonSchema():
            return {"type": ["object", "string"]}
    return {}

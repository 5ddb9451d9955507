"""What a section of the settings tree and a field of it are."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Section", "setting"]


def setting(
    default: object, effect: str, *, unit: str = "", none: str | None = None, **limits: Any
) -> Any:
    """Describe one setting.

    Args:
        default: its default.
        effect: what it does, for the reference.
        unit: unit of its value, if it has one.
        none: the word that stands for None, for a setting which may be None.
        **limits: pydantic's constraints.
    """
    return Field(
        default, description=effect, json_schema_extra={"unit": unit, "none": none}, **limits
    )


class Section(BaseModel):
    """A section: immutable, and a name it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _read_words_for_none(cls, values: Any) -> Any:
        # TOML and the environment have no null, so each optional setting has a word for it.
        if not isinstance(values, dict):
            return values
        read = dict(values)
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            word = extra.get("none") if isinstance(extra, dict) else None
            given = read.get(name)
            if word is not None and isinstance(given, str) and given.lower() == word:
                read[name] = None
        return read

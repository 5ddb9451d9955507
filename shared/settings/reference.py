"""The reference of all settings, written from the tree itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from .profiles import PROFILES
from .sources import environment_name
from .tree import Settings

__all__ = ["render_reference"]

_INTRODUCTION = """\
# Settings

Written by `python -m penstock.shared.settings > docs/settings.md`; do not edit by hand.

Every setting can be given in five ways. The first that gives it wins:

1. a flag of the command (each command's `--help` lists its own);
2. the environment variable shown here (an empty one counts as not set), and for the server's
   address also `REDIS_URL`;
3. a TOML file: the one named by `--config`, or by `PENSTOCK_CONFIG`, or `penstock.toml` in the
   current directory;
4. the profile that `worker.profile` names;
5. the default.

An unknown name, in the file or among the variables that begin with `PENSTOCK_`, is an error, and so
is a value out of range: nothing is ignored or clamped. (Variables that Kubernetes sets for a
Service called `penstock...` are left alone.)

```toml
[redis]
url = "redis://localhost:6379/0"

[engine]
max_sequences = 32
kv_memory = "512MiB"
```

## Profiles

| profile | sets |
|---|---|
"""


def render_reference() -> str:
    """Return the reference in Markdown."""
    parts = [_INTRODUCTION + "\n".join(_profile(*profile) for profile in PROFILES.items()) + "\n"]
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(f"## `[{section}]`\n\n{inspect.getdoc(model)}\n")
        parts += [_entry(section, name, item) for name, item in model.model_fields.items()]
    return "\n".join(parts)


def _profile(name: str, settings: Mapping[str, object]) -> str:
    values = ", ".join(f"`{setting} = {_literal(value)}`" for setting, value in settings.items())
    return f"| `{name}` | {values or 'nothing: all defaults'} |"


def _entry(section: str, name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    unit, none = extra["unit"], extra["none"]
    default = none if field.default is None else _literal(field.default)
    facts = [f"default `{default}`"]
    allowed = _allowed(field, none)
    if allowed:
        facts.append(allowed)
    if unit:
        facts.append(f"unit: {unit}")
    variable = environment_name(f"{section}.{name}")
    return f"### `{name}`\n\n`{variable}`: {'; '.join(facts)}.\n\n{field.description}\n"


def _literal(value: object) -> str:
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _allowed(field: FieldInfo, none: Any) -> str:
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    or_none = f", or `{none}`" if none else ""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{word}`" for word in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "one of " + ", ".join(f"`{word}`" for word in kind)
    if kind is bool:
        return "`true` or `false`"
    bounds = {
        sign: getattr(limit, name)
        for limit in field.metadata
        for name, sign in (("gt", "over"), ("ge", "from"), ("le", "to"))
        if getattr(limit, name, None) is not None
    }
    numbers = " ".join(f"{sign} {_literal(value)}" for sign, value in bounds.items())
    if kind is ByteSize:
        return f"bytes, or a size such as `512MiB`{or_none}"
    if kind in (int, float):
        name = "a whole number" if kind is int else "a number"
        return f"{name} {numbers}{or_none}"
    return f"text{or_none}"

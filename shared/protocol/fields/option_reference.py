"""The reference of all request options, written from their declarations."""

from __future__ import annotations

from textwrap import fill, indent

from ..request import REQUEST_OPTIONS
from .field_types import Option

__all__ = ["render_options"]

_INTRODUCTION = """\
# Request options

Written by `python -m penstock.shared.protocol > docs/options.md`; do not edit by hand.

These are the fields of a request beside `id` and `prompt`. Each may be left out and then has its
default. The names are the same for `Producer.submit`, in [the packed
request](protocol.md#the-request) and at [the ingress](ingress.md#its-fields). On [the command
line](cli.md#a-request) an option is a flag with hyphens: `max_tokens` is `--max-tokens`. An unknown
field and a value out of range are refused: nothing is ignored or clamped.

The ingress and the command line give each value as text, in the form of the third column. A list
of strings is given item by item: the field or flag may be repeated. At the ingress `stop_json`
and `choice_json` hold the whole list as a JSON array, for clients whose fields are a map. On the
command line a flag of `true` or `false` stands alone.

| Field | Type | As text | Range | Default |
|---|---|---|---|---|
"""

_COMBINATIONS = """\
## Options that exclude each other

* At most one of `json_schema`, `regex`, `grammar` and `choice`; and none of them with `ignore_eos`.
* `min_tokens` is at most `max_tokens`; `allowed_token_ids` has an id that is not in
  `banned_token_ids`.
* `best_of` is at least `n`. Over `n` it excludes `prompt_logprobs` and a `temperature` of 0.
* `length_penalty` and `early_stopping` need a `beam_width` over 1.
* With a `beam_width` over 1, `n` is at most `beam_width` and `temperature` is 0 or 1. It excludes
"""


def render_options() -> str:
    """Return the reference in Markdown."""
    rows = [
        f"| `{item.name}` | {item.type.wire} | {item.type.text} | {item.type.range} | "
        f"{_default(item)} |\n"
        for item in REQUEST_OPTIONS
    ]
    meanings = [f"* **`{item.name}`**: {item.help}\n" for item in REQUEST_OPTIONS]
    without = [f"`{item.name}`" for item in REQUEST_OPTIONS if not item.beam_search]
    excluded = fill(f"{', '.join(without[:-1])} and {without[-1]}.", 98)
    parts = [_INTRODUCTION, *rows, "\n## What they do\n\n", *meanings, "\n", _COMBINATIONS]
    return "".join(parts) + indent(excluded, "  ") + "\n"


def _default(item: Option) -> str:
    if item.unset:
        return item.unset
    if item.default == ():
        return "none"
    if isinstance(item.default, str):
        return f"`{item.default}`"
    return str(item.default).lower()

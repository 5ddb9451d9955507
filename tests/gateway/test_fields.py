"""The table of fields: it is what is documented, and it knows every field of OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from unit.pages import DOCS

from penstock.producer.gateway.openai.fields.chat_fields import CHAT_FIELDS
from penstock.producer.gateway.openai.fields.completion_fields import COMPLETION_FIELDS
from penstock.producer.gateway.openai.fields.field_reference import render_fields
from penstock.producer.gateway.openai.fields.field_table import FieldTable


def test_the_page_is_written_from_the_declarations() -> None:
    assert (DOCS / "gateway-fields.md").read_text("utf-8") == render_fields()


@pytest.mark.parametrize(
    ("params", "table"),
    [(chat_create_params, CHAT_FIELDS), (completion_create_params, COMPLETION_FIELDS)],
    ids=["chat", "completions"],
)
def test_every_field_of_openai_is_declared(params: Any, table: FieldTable) -> None:
    known = {*params.CompletionCreateParamsBase.__annotations__, "stream"}
    assert not known - set(table.fields)

"""The tables of fields: they are what is documented, and know every field of OpenAI's API."""

from __future__ import annotations

import pytest
from gateway.openai_forms import pinned
from unit.pages import DOCS

from penstock.producer.gateway.openai.encoders.encoder_fields import EMBEDDING_FIELDS
from penstock.producer.gateway.openai.fields.chat_fields import CHAT_FIELDS
from penstock.producer.gateway.openai.fields.completion_fields import COMPLETION_FIELDS
from penstock.producer.gateway.openai.fields.field_reference import render_fields
from penstock.producer.gateway.openai.fields.field_table import FieldTable
from penstock.producer.gateway.responses.response_fields import RESPONSE_FIELDS


def test_the_page_is_written_from_the_declarations() -> None:
    assert (DOCS / "gateway-fields.md").read_text("utf-8") == render_fields()


@pytest.mark.parametrize(
    ("endpoint", "table"),
    [
        ("chat", CHAT_FIELDS),
        ("completions", COMPLETION_FIELDS),
        ("responses", RESPONSE_FIELDS),
        ("embeddings", EMBEDDING_FIELDS),
    ],
)
def test_every_field_of_openai_is_declared(endpoint: str, table: FieldTable) -> None:
    known = set(pinned()["fields"][endpoint])
    assert {"model", "user"} < known
    if table is not EMBEDDING_FIELDS:
        known.add("stream")
    assert not known - set(table.fields)

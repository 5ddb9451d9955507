"""The tables of fields: they are what is documented, and know every field of OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import EmbeddingCreateParams, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from unit.pages import DOCS

from penstock.producer.gateway.encoders.encoder_fields import EMBEDDING_FIELDS
from penstock.producer.gateway.openai.fields.chat_fields import CHAT_FIELDS
from penstock.producer.gateway.openai.fields.completion_fields import COMPLETION_FIELDS
from penstock.producer.gateway.openai.fields.field_reference import render_fields
from penstock.producer.gateway.openai.fields.field_table import FieldTable
from penstock.producer.gateway.responses.response_fields import RESPONSE_FIELDS


def test_the_page_is_written_from_the_declarations() -> None:
    assert (DOCS / "gateway-fields.md").read_text("utf-8") == render_fields()


@pytest.mark.parametrize(
    ("params", "table"),
    [
        (chat_create_params.CompletionCreateParamsBase, CHAT_FIELDS),
        (completion_create_params.CompletionCreateParamsBase, COMPLETION_FIELDS),
        (response_create_params.ResponseCreateParamsBase, RESPONSE_FIELDS),
        (EmbeddingCreateParams, EMBEDDING_FIELDS),
    ],
    ids=["chat", "completions", "responses", "embeddings"],
)
def test_every_field_of_openai_is_declared(params: Any, table: FieldTable) -> None:
    known = {*params.__annotations__}
    assert {"model", "user"} < known
    if table is not EMBEDDING_FIELDS:
        known.add("stream")
    assert not known - set(table.fields)

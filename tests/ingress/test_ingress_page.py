"""docs/ingress.md says what is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.shared.protocol.chat.chat_options import CHAT_OPTIONS
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.fields.field_types import Option
from penstock.shared.protocol.plain_entry import Admission, Entry, Refusal, read_entry
from penstock.shared.protocol.request import MAX_PAYLOAD_BYTES, REQUEST_OPTIONS
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.ingress_operations import MAX_INGRESS_TENANTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ingress.md").read_text("utf-8")


def table(*head: str) -> list[list[str]]:
    block = PAGE.partition("| " + " | ".join(head) + " |\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in block.splitlines()[1:]]
    assert rows
    return [[cell.strip() for cell in row] for row in rows]


def test_every_field_is_in_the_table_with_a_value_that_is_accepted() -> None:
    documented = []
    for names, _, sample in table("Field", "Form", "Such as"):
        for name in re.findall(r"`(\w+)`", names):
            documented.append(name)
            asked = ("prompt_ids", "messages", "prompt", "payload")
            fields = {"prompt": "Hi"} if name not in asked else {}
            fields[name] = sample.strip("`")
            parts = [part.encode() for pair in fields.items() for part in pair]
            verdict = read_entry(Entry(None, "1-1", parts))
            assert isinstance(verdict, Admission), (name, verdict)
    verdict = read_entry(Entry(None, "1-1", [b"prompt", b"Hi", b"colour", b"red"]))
    assert isinstance(verdict, Refusal)
    known = verdict.message.partition("one of the fields ")[2].split(", ")
    assert sorted([*documented, *(item.name for item in REQUEST_OPTIONS)]) == known


TOOLS = '[{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}]'
ASK = b'[{"role":"user","content":"Hi"}]'

SAMPLES = {
    "tenant": "acme", "deadline_ms": "30000", "max_queue_ms": "100", "logit_bias": '{"42":-1.5}',
    "allowed_token_ids": "[7]", "banned_token_ids": "[0,2]", "logprobs": "5",
    "prompt_logprobs": "5", "seed": "7", "stop": "###", "stop_token_ids": "[0,2]", "best_of": "2",
    "json_schema": '{"type":"integer"}', "regex": "[0-9]", "grammar": 'start: "a"', "choice": "yes",
    "retention_ms": "60000", "tools": TOOLS, "chat_template_kwargs": '{"terse":true}',
    "reasoning_effort": "low",
}  # fmt: skip


@pytest.mark.parametrize("item", REQUEST_OPTIONS, ids=lambda item: item.name)
def test_every_option_is_read_from_its_form_as_text(item: Option) -> None:
    text = SAMPLES.get(item.name) or str(item.default).lower()
    of_chat = item.name in CHAT_OPTIONS.defaults
    prompt = [b"messages", ASK] if of_chat else [b"prompt", b"Hi"]
    verdict = read_entry(Entry(None, "1-1", [*prompt, item.name.encode(), text.encode()]))
    assert isinstance(verdict, Admission), verdict
    request = verdict.request
    # The request's own seed is the one in force; its option is what was asked for.
    owner = next(one for one in (request.options, request.chat, request) if hasattr(one, item.name))
    value = getattr(owner, item.name)
    assert (value == item.default) is (item.name not in SAMPLES)


@pytest.mark.parametrize("row", table("Event", "Form"), ids=lambda row: row[0])
def test_events_are_what_a_reader_takes(row: list[str]) -> None:
    event = row[1].strip("`").encode()
    assert unpack_event(event).pack(Answer.JSON) == event
    assert json.loads(event)


def test_reasons_and_bounds_exist() -> None:
    reasons = {row[0].strip("`") for row in table("Reason", "When")}
    assert reasons <= {reason.value for reason in Reason}
    assert f"{MAX_PAYLOAD_BYTES:,} bytes in all" in PAGE
    assert f"{MAX_INGRESS_TENANTS:,} tenants' streams" in PAGE

"""What an entry says: every field, every kind of nonsense, and where the answer goes."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.chat.chat_options import ChatOptions
from penstock.shared.protocol.plain_entry import Admission, Entry, Refusal, read_entry
from penstock.shared.protocol.request import MAX_PAYLOAD_BYTES, Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Answer, Lane, Reason

NAME = "1700000000000-0"


def entry(*parts: str | bytes, tenant: str | None = None) -> Entry:
    return Entry(tenant, NAME, [p.encode() if isinstance(p, str) else p for p in parts])


def request_of(*parts: str | bytes, tenant: str | None = None) -> Request:
    admission = read_entry(entry(*parts, tenant=tenant))
    assert isinstance(admission, Admission), admission
    assert admission.payload == admission.request.pack()
    return admission.request


def refusal_of(*parts: str | bytes, tenant: str | None = None) -> Refusal:
    refusal = read_entry(entry(*parts, tenant=tenant))
    assert isinstance(refusal, Refusal), refusal
    assert refusal.reason is Reason.INVALID
    return refusal


EVERY_FIELD = (
    "id", "abc", "prompt", "Hello, wörld", "lane", "critical", "tenant", "t1", "max_tokens", "64",
    "temperature", "0.7", "top_k", "5", "top_p", "9e-1", "min_p", "0.05", "seed", "7",
    "stop", "\n", "stop", "[END]", "stop_token_ids", "[1, 2]", "ignore_eos", "true",
    "deadline_ms", "5000", "max_queue_ms", "100", "answer", "json",
)  # fmt: skip


def test_every_field_is_read() -> None:
    assert request_of(*EVERY_FIELD) == Request(
        id="abc",
        prompt="Hello, wörld",
        lane=Lane.CRITICAL,
        tenant="t1",
        options=SamplingOptions(
            max_tokens=64, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=7,
            stop=("\n", "[END]"), stop_token_ids=(1, 2), ignore_eos=True,
        ),
        deadline_ms=5000,
        max_queue_ms=100,
        answer=Answer.JSON,
    )  # fmt: skip


def test_no_field_of_a_request_is_left_out() -> None:
    kinds = (Request, SamplingOptions, ChatOptions)
    names = {f.name for kind in kinds for f in fields(kind)} - {"options", "chat"}
    known = refusal_of(*HI, "colour", "red").message.partition("one of the fields ")[2]
    assert set(known.split(", ")) == names | {"prompt_ids", "messages", "stop_json", "choice_json"}


def test_a_field_that_is_nearly_right_is_named() -> None:
    assert refusal_of(*HI, "max_token", "3").message.endswith("; did you mean max_tokens?")
    with pytest.raises(InvalidRequest, match=r"^top_pp: got 1; .*; did you mean top_p\?$"):
        Request.build(id="x", prompt="hi", top_pp=1)


def test_a_prompt_alone_is_a_request() -> None:
    assert request_of("prompt", "Hi") == Request(id=NAME, prompt="Hi")
    assert request_of("prompt", "Hi", tenant="acme") == Request(
        id=f"acme.{NAME}", prompt="Hi", tenant="acme"
    )


def test_other_kinds_of_prompt() -> None:
    assert request_of("prompt_ids", "[5, 6]").prompt == (5, 6)
    chat = request_of("messages", '[{"role":"user","content":"Hi"}]')
    assert chat.prompt == ({"role": "user", "content": "Hi"},)
    assert request_of("prompt", "[5, 6]").prompt == "[5, 6]"
    assert request_of("prompt", "x", "stop_json", '["a","b"]').options.stop == ("a", "b")


def test_forms_of_outputs() -> None:
    hi = ("prompt", "x")
    assert request_of(*hi, "choice", "a", "choice", "[b]").options.choice == ("a", "[b]")
    assert request_of(*hi, "choice_json", '["a","b"]').options.choice == ("a", "b")
    schema = '{"type": "integer"}'
    assert request_of(*hi, "json_schema", schema).options.json_schema == schema
    assert request_of(*hi, "regex", "[0-9]").options.regex == "[0-9]"
    assert request_of(*hi, "grammar", 'start: "a"').options.grammar == 'start: "a"'


HI = ("id", "abc", "prompt", "Hi")
DEEP = "[" * 100_000

BAD = [
    (("id", "abc"), "prompt: "),
    (("id", "abc", "prompt", ""), "prompt: "),
    ((*HI, "prompt_ids", "[1]"), "exactly one of"),
    ((*HI, "max_tokens", "many"), "max_tokens: got 'many'"),
    ((*HI, "max_tokens", "1_000"), "max_tokens: "),
    ((*HI, "max_tokens", " 5"), "max_tokens: "),
    ((*HI, "max_tokens", "٣"), "max_tokens: "),
    ((*HI, "max_tokens", "1.5"), "max_tokens: "),
    ((*HI, "max_tokens", "0"), "max_tokens: got 0"),
    ((*HI, "max_tokens", "9" * 5000), "max_tokens: "),
    ((*HI, "temperature", "nan"), "temperature: "),
    ((*HI, "temperature", "1e999"), "temperature: "),
    ((*HI, "temperature", "0x1p3"), "temperature: "),
    ((*HI, "temperature", "-0.1"), "temperature: "),
    ((*HI, "seed", "-1"), "seed: "),
    ((*HI, "ignore_eos", "1"), "ignore_eos: "),
    ((*HI, "early_stopping", "no"), "early_stopping: got 'no'; allowed: true, false or never"),
    ((*HI, "json_schema", "[]"), "json_schema: "),
    ((*HI, "json_schema", DEEP), "json_schema: "),
    ((*HI, "regex", "a", "choice", "b"), "choice: "),
    ((*HI, "choice", "a", "choice_json", '["b"]'), "choice_json: "),
    ((*HI, "choice", "a", "choice", "a"), "choice: "),
    ((*HI, "lane", "urgent"), "lane: got 'urgent'; allowed: critical or normal or batch"),
    ((*HI, "tenant", "a b"), "tenant: "),
    ((*HI, "answer", "xml"), "answer: "),
    ((*HI, "deadline_ms", "0"), "deadline_ms: "),
    ((*HI, "colour", "red"), "colour: got 'red'; allowed: one of"),
    ((*HI, "id", "abd"), "id: got 'abd'; allowed: this field once"),
    ((*HI, "stop", ""), "stop[0]: "),
    ((*HI, "stop", "x", "stop_json", "[]"), "stop_json: "),
    ((*HI, "stop_json", '"x"'), "stop_json: "),
    ((*HI, "stop_json", "[1]"), "stop[0]: "),
    ((*HI, "stop_json", DEEP), "stop_json: "),
    ((*HI, "stop_token_ids", "[true]"), "stop_token_ids[0]: "),
    (("id", "abc", "prompt_ids", "[1.5]"), "prompt_ids: "),
    (("id", "abc", "prompt_ids", '[{"role":"user","content":"Hi"}]'), "prompt_ids: "),
    (("id", "abc", "prompt_ids", "[]"), "prompt: "),
    (("id", "abc", "messages", "[1]"), "messages: "),
    (("id", "abc", "messages", '[{"role":"user"}]'), "prompt[0].content: "),
    (("id", "abc", "messages", "{}"), "messages: "),
    (("id", "abc", "prompt", b"\xff\xfe"), "prompt: got b'\\xff\\xfe'; allowed: text in UTF-8"),
    ((*HI, b"\xff", "x"), "field name: "),
    ((*HI, "", "x"), ": got "),
    (("id", "abc", "prompt", "x" * (MAX_PAYLOAD_BYTES + 1)), "entry: "),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_fields_are_named(parts: tuple[str | bytes, ...], message: str) -> None:
    refusal = refusal_of(*parts)
    assert message in refusal.message
    assert len(refusal.message) < 2000
    assert refusal.id in ("abc", "abd")


@pytest.mark.parametrize("id", ["", "a b", "-x", "x" * 129, b"\xff", "é"])
def test_an_id_that_is_none_is_answered_at_the_entrys_own_name(id: str | bytes) -> None:
    refusal = refusal_of("id", id, "prompt", "Hi", "answer", "json")
    assert (refusal.id, refusal.answer) == (NAME, Answer.JSON)
    assert "id: got " in refusal.message


def test_a_tenants_stream_decides_the_tenant() -> None:
    assert request_of("prompt", "Hi", "id", "acme.7", tenant="acme").tenant == "acme"
    assert request_of("prompt", "Hi", "tenant", "acme", tenant="acme").tenant == "acme"
    forged = refusal_of("prompt", "Hi", "tenant", "rival", tenant="acme")
    assert (forged.id, "tenant: got 'rival'" in forged.message) == (f"acme.{NAME}", True)


@pytest.mark.parametrize("id", ["rival.7", "acme", "acme7", "x", "acmes.7"])
def test_a_tenants_ids_begin_with_its_name(id: str) -> None:
    refusal = refusal_of("prompt", "Hi", "id", id, tenant="acme")
    assert refusal.id == f"acme.{NAME}"
    assert "begins with acme." in refusal.message


NAMES = [name.encode() for name in {*EVERY_FIELD[::2], "prompt_ids", "messages", "stop_json"}]
VALUES = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"1", b"json", b"true", b"[]", b"[1]", b'["x"]', b"abc", b"1e5", b"-0"]),
)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES) | st.binary(max_size=8), VALUES), max_size=8),
    st.sampled_from([None, "acme"]),
)
def test_whatever_an_entry_holds_there_is_a_verdict(
    pairs: list[tuple[bytes, bytes]], tenant: str | None
) -> None:
    verdict = read_entry(Entry(tenant, NAME, [part for pair in pairs for part in pair]))
    if isinstance(verdict, Admission):
        assert Request.unpack(verdict.payload) == verdict.request
        answered_at = verdict.request.id
    else:
        verdict.message.encode()
        answered_at = verdict.id
    assert tenant is None or answered_at.startswith("acme.")

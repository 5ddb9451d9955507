"""Requests from outside, valid ones changed at random: each is a request or a bounded refusal."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack
import pytest
from fuzz.corpus import ENTRIES, PAYLOADS
from fuzz.generators import PROMPTS, VALID, damaged
from fuzz.targets import EVENTS
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import InvalidRequest, ProtocolError
from penstock.shared.protocol.event_reader import unpack_event, unpack_letter
from penstock.shared.protocol.plain_entry import Admission, Entry, read_entry
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions

FUZZ = settings.get_profile("fuzz")
MAX_MESSAGE = 1200

STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30),
    st.binary(max_size=30).map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.sampled_from(
        [10**400, -(10**4000), 2**31, 2**63, 2**64, float("nan"), float("inf"), -0.0, 1e308, "",
         "\ud800", "\x00", "\n", "\u202e", "k" * 100_000, "true", "1e5", "0x1", "\u0661"]
    ),
)  # fmt: skip
VALUES = st.recursive(
    STRANGE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def nested(depth: int, *, as_map: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if as_map else [value]
    return value


DEEP = st.builds(nested, st.sampled_from([5, 9, 101, 400]), as_map=st.booleans())


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a valid request, some of them replaced, dropped or added."""
    prompt, value = draw(st.sampled_from(PROMPTS))
    names = draw(st.lists(st.sampled_from(sorted(VALID)), max_size=4))
    fields = {"id": "a", prompt: value, **{name: VALID[name] for name in names}}
    for _ in range(draw(st.integers(0, 3))):
        known = st.sampled_from([*VALID, *(name for name, _ in PROMPTS), "id", "v", "stop_json"])
        name = draw(known | st.text(max_size=8))
        fields[name] = draw(VALUES | DEEP)
        if draw(st.booleans()):
            fields.pop(draw(st.sampled_from(sorted(fields))))
    return fields


def check_refusal(message: str) -> None:
    assert message.isprintable()
    assert 0 < len(message) <= MAX_MESSAGE
    assert "allowed: " in message
    message.encode()


def check_payload(payload: bytes) -> None:
    try:
        request = Request.unpack(payload)
    except InvalidRequest as error:
        check_refusal(str(error))
    else:
        assert Request.unpack(request.pack()) == request


def check_entry(entry: Entry) -> None:
    verdict = read_entry(entry)
    if isinstance(verdict, Admission):
        assert Request.unpack(verdict.payload) == verdict.request
        answered_at = verdict.request.id
    else:
        check_refusal(verdict.message)
        answered_at = verdict.id
    assert entry.tenant is None or answered_at.startswith(f"{entry.tenant}.")
    Request(id=answered_at, prompt="x")


def packed(fields: Any) -> bytes:
    try:
        data: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    except (OverflowError, ValueError):  # what msgpack has no form for
        return b""
    return data


def mutated(data: bytes, seed: int) -> bytes:
    """Bytes with some of them flipped, dropped, repeated or exchanged."""
    dice = random.Random(seed)
    return damaged(dice, data, dice.randrange(4))


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_payloads_that_once_escaped(payload: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request.unpack(payload)
    check_refusal(str(caught.value))


@pytest.mark.parametrize("parts", ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize("tenant", [None, "evil"])
def test_entries_that_once_escaped(parts: list[str], tenant: str | None) -> None:
    verdict = read_entry(Entry(tenant, "1-1", [part.encode() for part in parts]))
    assert not isinstance(verdict, Admission)
    check_entry(Entry(tenant, "1-1", [part.encode() for part in parts]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 10**400), ("max_tokens", 10**5000), ("seed", -(10**5000)), ("stop", [{1: 2}])],
    ids=("temperature", "max_tokens", "seed", "stop"),
)
def test_values_that_once_escaped(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}\b") as caught:
        SamplingOptions(**{field: value})
    check_refusal(str(caught.value))


@settings(FUZZ)
@given(messages(), st.integers(0, 2**32))
def test_payloads(fields: dict[str, Any], seed: int) -> None:
    for name in ("prompt_ids", "messages"):
        if name in fields:
            fields["prompt"] = fields.pop(name)
    payload = packed({"v": 1, **fields})
    check_payload(payload)
    check_payload(mutated(payload, seed))


@settings(FUZZ)
@given(messages(), st.sampled_from([None, "acme"]), st.integers(0, 2**32))
def test_entries(fields: dict[str, Any], tenant: str | None, seed: int) -> None:
    parts: list[bytes] = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else json_text(value)
        repeat = 2 if name in ("stop", "choice") else 1
        parts += [name.encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")] * (
            repeat
        )
    check_entry(Entry(tenant, "1700000000000-0", parts))
    parts = [mutated(part, seed + at) for at, part in enumerate(parts)]
    check_entry(Entry(tenant, "1700000000000-0", parts))


def json_text(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # an integer of more digits than Python writes
        return "9" * 5000


@settings(FUZZ)
@given(messages())
def test_values_from_a_program(fields: dict[str, Any]) -> None:
    for name in ("prompt_ids", "messages"):
        fields.pop(name, None)
    try:
        Request.build(**{"id": "a", "prompt": "x", **fields})
    except InvalidRequest as error:
        check_refusal(str(error))


@settings(FUZZ)
@given(st.sampled_from(EVENTS), st.integers(0, 8), VALUES | DEEP, st.integers(0, 2**32))
def test_events(event: list[Any], at: int, value: Any, seed: int) -> None:
    changed = [*event[:at], value, *event[at + 1 :]]
    names = ("start", "ids", "text", "digest", "logprobs", "lengths", "parts", "prompt_logprobs")
    as_json = json_text(dict(zip(names, changed, strict=False))).encode("utf-8", "surrogatepass")
    for data in (packed(changed), as_json):
        for form in (data, mutated(data, seed)):
            for read in (unpack_event, unpack_letter):
                try:
                    read(form)
                except ProtocolError as error:
                    check_refusal(str(error))

"""Requests with a payload, and the chunk that answers one, in both forms on the wire."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.reading.merge import Merger
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.event_reader import unpack_event as read
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.payload import (
    MAX_RESULT_BYTES,
    pack_result,
    unpack_result,
)
from penstock.shared.protocol.plain_entry import Admission, Entry, Refusal, read_entry
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Answer, Reason

LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(
    allow_nan=False
) | st.text(max_size=8) | st.binary(max_size=8)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


def depth(value: object) -> int:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (1 + max(map(depth, below), default=0)) if isinstance(value, dict | list) else 0


@given(VALUES.filter(lambda value: value is not None and depth(value) <= 7))
def test_a_payload_comes_back_as_it_was(payload: Any) -> None:
    request = Request.build(id="r", payload=payload, lane="critical")
    again = Request.unpack(request.pack())
    assert again == request
    assert again.payload == payload
    assert again.pack() == request.pack()
    assert again.cost_estimate == again.prompt_estimate + 1


def test_tuples_travel_as_lists() -> None:
    assert Request.build(id="r", payload=(1, {"a": (2,)})).payload == [1, {"a": [2]}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "Hi", "payload": b"x"},
        {"payload": object()},
        {"payload": 2**64},
        {"payload": {1: 2}},
        {"payload": "\ud800"},
        {"payload": [[[[[[[[1]]]]]]]]},
        {"payload": b"x", "max_tokens": 3},
        {"payload": b"x", "tokenize": True},
        {"payload": b"x", "parse_response": True},
    ],
)
def test_what_is_no_payload_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Request.build(id="r", **fields)


def test_a_payload_is_bounded() -> None:
    Request.build(id="r", payload=b"x" * (1 << 19)).pack()
    with pytest.raises(InvalidRequest, match=r"payload: .*1048576 bytes"):
        Request.build(id="r", payload=b"x" * (1 << 20)).pack()


def test_from_the_ingress() -> None:
    fields = [b"id", b"r", b"payload", b'{"pixels": [1, 2.5]}']
    admitted = read_entry(Entry(None, "1-0", fields))
    assert isinstance(admitted, Admission)
    assert admitted.request.payload == {"pixels": [1, 2.5]}
    for bad in (b"null", b"{", b"[" * 9 + b"]" * 9):
        refused = read_entry(Entry(None, "1-0", [b"payload", bad]))
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.INVALID
        assert "payload" in refused.message


@given(VALUES)
def test_a_result_is_one_chunk(value: Any) -> None:
    chunk = Chunk(0, (0,), "", rolling_digest((0,)), result=pack_result(value))
    for answer in Answer:
        try:
            packed = chunk.pack(answer)
        except ValueError:
            assert answer is Answer.JSON
            assert "NaN" in repr(value) or "inf" in repr(value)
            continue
        again = read(packed)
        assert isinstance(again, Chunk)
        if answer is Answer.MSGPACK:
            assert again == chunk
            assert unpack_result(again.result) == value
        merger = Merger("r")
        for event in (again, again, End(n=1, reason=Reason.STOP), again):
            assert merger.add(event)
        assert list(merger.ready) == [again]


def test_bytes_of_a_result_are_base64_in_json() -> None:
    chunk = Chunk(0, (0,), "", 1, result=pack_result({"image": b"\x00\xff", "score": 0.1}))
    wire = json.loads(chunk.pack(Answer.JSON))
    assert wire["result"] == {"image": "AP8=", "score": 0.1}


def test_floats_of_a_result_keep_their_precision() -> None:
    packed = Chunk(0, (0,), "", 1, result=pack_result(0.1)).pack()
    again = read(packed)
    assert isinstance(again, Chunk)
    assert unpack_result(again.result) == 0.1


@pytest.mark.parametrize("value", [object(), {1, 2}, 2**64, b"x" * (MAX_RESULT_BYTES + 1)])
def test_what_is_no_result_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^the result "):
        pack_result(value)


def test_nan_has_no_form_in_json() -> None:
    chunk = Chunk(0, (0,), "", 1, result=pack_result(math.nan))
    with pytest.raises(ValueError, match="JSON"):
        chunk.pack(Answer.JSON)


@pytest.mark.parametrize("result", [5, "text", [b"x"]])
def test_a_chunk_with_a_result_that_is_not_packed_is_refused(result: object) -> None:
    wire = (0, [0], "", 1, None, None, None, None, None, result)
    with pytest.raises(InvalidRequest):
        read(msgpack.packb(wire))

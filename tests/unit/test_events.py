"""Chunks on the wire, in both forms, with log-probabilities and without."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from penstock.producer.reading.merge import Merger
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, TokenLogprobs, rolling_digest
from penstock.shared.protocol.states import Answer

REPORTS = (
    TokenLogprobs(-0.25, ((5, -0.25), (9, -1.5))),
    TokenLogprobs(-3.5, ((7, -0.125),)),
    TokenLogprobs(0.0),
)
PLAIN = Chunk(2, (5, 6, 7), "abc", rolling_digest((5, 6, 7), rolling_digest((1, 2))))
CHUNK = Chunk(PLAIN.start, PLAIN.token_ids, PLAIN.text, PLAIN.digest, REPORTS)


@pytest.mark.parametrize("answer", Answer)
@pytest.mark.parametrize("chunk", [PLAIN, CHUNK])
def test_a_chunk_survives_the_wire(chunk: Chunk, answer: Answer) -> None:
    event = unpack_event(chunk.pack(answer))
    assert event == chunk
    assert isinstance(event, Chunk)
    assert all(isinstance(report, TokenLogprobs) for report in event.logprobs)


@pytest.mark.parametrize("answer", Answer)
def test_prompt_logprobs_are_an_eighth_element(answer: Answer) -> None:
    for chunk in (PLAIN, CHUNK):
        whole = chunk._replace(prompt_logprobs=(None, *REPORTS))
        assert unpack_event(whole.pack(answer)) == whole
        assert whole.without(1).prompt_logprobs == ()
    wire = msgpack.unpackb(whole.pack())
    assert wire[:5] == msgpack.unpackb(CHUNK.pack())
    assert wire[5:7] == [None, None]
    assert wire[7] == [None, *wire[4]]


@pytest.mark.parametrize("extra", [[[-1.0, []]], 7, [None, None], [None, [1]], "abc"])
def test_a_malformed_eighth_element_is_refused(extra: Any) -> None:
    wire = msgpack.unpackb(PLAIN.pack())
    with pytest.raises(ProtocolError):
        unpack_event(msgpack.packb([*wire, None, None, None, extra]))


def test_logprobs_are_a_fifth_element_that_others_may_ignore() -> None:
    wire = msgpack.unpackb(CHUNK.pack())
    assert wire[:4] == msgpack.unpackb(PLAIN.pack())
    assert wire[4] == [[-0.25, [[5, -0.25], [9, -1.5]]], [-3.5, [[7, -0.125]]], [0.0, []]]
    assert len(wire) == 5
    # 32 bits each: 0xca begins a msgpack float32.
    assert CHUNK.pack().count(b"\xca") >= 6
    assert json.loads(CHUNK.pack(Answer.JSON))["logprobs"] == wire[4]
    assert "logprobs" not in json.loads(PLAIN.pack(Answer.JSON))


@pytest.mark.parametrize("extra", [None, []])
def test_an_empty_fifth_element_says_nothing(extra: Any) -> None:
    wire = msgpack.unpackb(PLAIN.pack())
    assert unpack_event(msgpack.packb([*wire, extra])) == PLAIN
    assert unpack_event(msgpack.packb([*wire, *[extra] * 6, "of a later version"])) == PLAIN


@pytest.mark.parametrize("extra", [[[-1.0, []]], 7, [[-1.0], [-1.0], [-1.0]], [1, 2, 3], "abc"])
def test_a_malformed_fifth_element_is_refused(extra: Any) -> None:
    wire = msgpack.unpackb(PLAIN.pack())
    with pytest.raises(ProtocolError):
        unpack_event(msgpack.packb([*wire, extra]))


def test_a_chunk_that_is_cut_keeps_the_logprobs_of_its_tokens() -> None:
    merger = Merger("r", index=3, digest=rolling_digest((1, 2, 5)))
    assert merger.add(CHUNK)
    (chunk,) = merger.ready
    assert (chunk.token_ids, chunk.logprobs) == ((6, 7), REPORTS[1:])

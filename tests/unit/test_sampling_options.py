"""Sampling options: what is taken, what is refused by name, and that the wire keeps them."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import Request, SamplingOptions


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("min_p", 1, 1.01),
        ("min_p", 0, -0.1),
        ("repetition_penalty", 10, 10.1),
        ("repetition_penalty", 0.1, 0),
        ("presence_penalty", -2, -2.1),
        ("frequency_penalty", 2, 2.1),
        ("frequency_penalty", 0, float("nan")),
        ("logit_bias", dict.fromkeys(range(300), 1), dict.fromkeys(range(301), 1)),
        ("logit_bias", {0: 100, 1: -100}, {0: 100.1}),
        ("logit_bias", {"7": 1}, {"x": 1}),
        ("logit_bias", {2**31 - 1: 1}, {2**31: 1}),
        ("logit_bias", {}, {-1: 1}),
        ("logit_bias", None, {7: 1, "7": 2}),
        ("logit_bias", {7: 1}, [(7, 1)]),
        ("logit_bias", {7: 1}, {7: True}),
        ("logit_bias", {7: 1}, {True: 1}),
        ("allowed_token_ids", [1] * 4096, [1] * 4097),
        ("banned_token_ids", [1] * 4096, [-1]),
        ("min_tokens", 256, 257),  # more than max_tokens
        ("min_tokens", 0, -1),
        ("logprobs", 20, 21),
        ("logprobs", 0, -1),
        ("logprobs", None, True),
    ],
)
def test_ranges(field: str, good: Any, bad: Any) -> None:
    SamplingOptions(**{field: good})
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        SamplingOptions(**{field: bad})


def test_allowed_ids_that_are_all_banned_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^allowed_token_ids\b"):
        SamplingOptions(allowed_token_ids=[1, 2], banned_token_ids=[2, 1, 3])


def test_options_survive_the_wire() -> None:
    request = Request.build(
        id="a",
        prompt="x",
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={300: -100, 2: 0.5},
        allowed_token_ids=[1, 2, 300],
        banned_token_ids=[3],
        min_tokens=4,
        logprobs=0,
    )
    assert Request.unpack(request.pack()) == request
    assert msgpack.unpackb(request.pack())["logit_bias"] == {"2": 0.5, "300": -100.0}


def test_equal_biases_have_equal_bytes_and_none_have_none() -> None:
    one = Request.build(id="a", prompt="x", logit_bias={300: -1, 2: 0.5})
    other = Request.build(id="a", prompt="x", logit_bias={"2": 0.5, "300": -1.0})
    assert one == other
    assert one.pack() == other.pack()
    empty = Request.build(id="a", prompt="x", logit_bias={})
    assert empty.pack() == Request(id="a", prompt="x").pack()
    assert hash(one.options) == hash(other.options)


def test_what_ends_an_output() -> None:
    eos = frozenset({1, 2})
    assert SamplingOptions().ending_ids(eos) == {1, 2}
    assert SamplingOptions(stop_token_ids=[5]).ending_ids(eos) == {1, 2, 5}
    assert SamplingOptions(stop_token_ids=[5], ignore_eos=True).ending_ids(eos) == {5}

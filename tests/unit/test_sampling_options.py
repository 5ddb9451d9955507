"""Sampling options: what is taken, what is refused by name, and that the wire keeps them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgpack
import pytest

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions


def deep_map(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


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
        ("prompt_logprobs", 20, 21),
        ("prompt_logprobs", 0, -1),
    ],
)
def test_ranges(field: str, good: Any, bad: Any) -> None:
    SamplingOptions(**{field: good})
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        SamplingOptions(**{field: bad})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("json_schema", {"type": "integer"}, "{'type': 'integer'}"),
        ("json_schema", '{"type": "integer"}', "[1]"),
        ("json_schema", "{}", ""),
        ("json_schema", {}, {"enum": [float("nan")]}),
        ("json_schema", {"a": MappingProxyType({})}, {"a": {1, 2}}),
        ("json_schema", {"const": "x" * 65_000}, {"const": "x" * 65_530}),
        ("json_schema", None, True),
        ("json_schema", None, '{"a":' * 10_000 + "1" + "}" * 10_000),
        ("json_schema", None, deep_map(100_000)),
        ("regex", "a" * 8192, "a" * 8193),
        ("regex", None, ""),
        ("regex", None, b"a"),
        ("grammar", "a" * 65_536, "a" * 65_537),
        ("grammar", None, "\ud800"),
        ("choice", ["a", "b"], ["a", "a"]),
        ("choice", "abc", [""]),
        ("choice", [str(i) for i in range(1024)], [str(i) for i in range(1025)]),
        ("choice", ["x" * 1024], ["x" * 1025]),
        ("choice", [], ["x" * 1000 + str(i) for i in range(66)]),
        ("choice", (), None),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, dict) else "map",
)
def test_forms_of_the_output(field: str, good: Any, bad: Any) -> None:
    options = SamplingOptions(**{field: good})
    assert options.constraint == (field if good or good == {} else None)
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        SamplingOptions(**{field: bad})


def test_an_output_has_one_form() -> None:
    with pytest.raises(InvalidRequest, match=r"^choice: .* regex is given, too"):
        SamplingOptions(regex="a", choice=["a"])
    with pytest.raises(InvalidRequest, match=r"^ignore_eos: got True; allowed: false"):
        SamplingOptions(grammar="start: /a/", ignore_eos=True)


def test_beam_search_goes_without_a_form() -> None:
    with pytest.raises(InvalidRequest, match=r"^regex: got 'a'; allowed: nothing beside beam"):
        SamplingOptions(regex="a", beam_width=2)


def test_a_report_of_a_prompt_has_a_bound() -> None:
    Request.build(id="a", prompt=[5] * 3120, prompt_logprobs=20)
    Request.build(id="a", prompt=[5] * 65_536, prompt_logprobs=0)
    for length, width in ((3121, 20), (65_537, 0)):
        with pytest.raises(InvalidRequest, match=rf"^prompt_logprobs: got {width}; allowed: less"):
            Request.build(id="a", prompt=[5] * length, prompt_logprobs=width)


@pytest.mark.parametrize("options", [{"beam_width": 2}, {"best_of": 2}], ids=str)
def test_what_is_published_whole_reports_no_prompt(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs: got 1; allowed: nothing beside"):
        SamplingOptions(prompt_logprobs=1, **options)


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {"const": "ä"}}}
    text = '{"type":"object","properties":{"z":{},"a":{"const":"ä"}}}'
    assert SamplingOptions(json_schema=schema).json_schema == text
    packed = Request.build(id="a", prompt="x", json_schema=schema).pack()
    assert Request.unpack(packed).options.json_schema == text


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


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 65}),
        ("n", {"n": 3, "beam_width": 2}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("best_of", {"best_of": 2, "temperature": 0}),
        ("best_of", {"best_of": 65}),
        ("beam_width", {"beam_width": 0}),
        ("best_of", {"best_of": 4, "beam_width": 4}),
        ("temperature", {"beam_width": 2, "temperature": 0.7}),
        ("top_k", {"beam_width": 2, "top_k": 5}),
        ("stop", {"beam_width": 2, "stop": ["x"]}),
        ("logprobs", {"beam_width": 2, "logprobs": 1}),
        ("length_penalty", {"length_penalty": 2.0}),
        ("early_stopping", {"early_stopping": True}),
        ("early_stopping", {"beam_width": 2, "early_stopping": "sometimes"}),
    ],
)
def test_outputs_whose_options_contradict_each_other(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingOptions(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": 2, "beam_width": 4, "temperature": 0, "early_stopping": "never"}, 4),
        ({"beam_width": 4, "length_penalty": -1, "early_stopping": True}, 4),
    ],
)
def test_every_sequence_counts_at_submission(options: dict[str, Any], sequences: int) -> None:
    request = Request.build(id="r", prompt=[1, 2, 3], max_tokens=10, **options)
    assert request.options.num_sequences == sequences
    assert request.cost_estimate == 3 + 10 * sequences
    assert Request.unpack(request.pack()) == request

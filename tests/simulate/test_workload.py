"""Distributions, arrivals and trace files."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from simulate.fleets import drawn

from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol.states import Lane
from penstock.tools.simulate import Lengths, read_trace, write_trace


@pytest.mark.parametrize(
    ("text", "mean"),
    [("const:7", 7), ("uniform:10:20", 15), ("exp:100", 100), ("lognormal:200:1", 200)],
)
def test_lengths_have_their_mean(text: str, mean: float) -> None:
    rng, sampler = random.Random(0), Lengths(text).sampler()
    values = [sampler(rng) for _ in range(40_000)]
    assert min(values) >= 1
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.03)


def test_lengths_are_cut() -> None:
    rng, lengths = random.Random(0), Lengths("lognormal:200:2:max=300")
    values = [lengths.sampler()(rng) for _ in range(2000)]
    assert (max(values), lengths.most) == (300, 300)


@pytest.mark.parametrize(
    "text",
    ["", "const", "const:0", "const:x", "uniform:5:2", "exp:0", "gauss:3", "exp:5:max=0", "exp:nan",
     "lognormal:100", "const:5:6", "const:200000"],
)  # fmt: skip
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="allowed: const:N"):
        Lengths(text)


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 3.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    times = [request.arrival for request in drawn(30_000, 50.0, burstiness=burstiness)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.06)
    assert deviation / mean == pytest.approx(burstiness, rel=0.06, abs=1e-6)


def test_mixes_have_their_weights() -> None:
    requests = list(drawn(6000, 10.0))
    critical = sum(request.lane is Lane.CRITICAL for request in requests)
    assert critical / 6000 == pytest.approx(1 / 6, rel=0.1)
    assert sum(request.tenant == "b" for request in requests) / 6000 == pytest.approx(
        2 / 3, rel=0.1
    )


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, requests = tmp_path / "trace.jsonl", list(drawn(50, 10.0))
    write_trace(requests, path)
    assert list(read_trace(path)) == requests


def test_a_trace_needs_three_fields(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "prompt_len": 3, "output_len": 4}\n\n')
    (request,) = read_trace(path)
    assert (request.lane, request.tenant, request.max_tokens) == (Lane.NORMAL, "default", 4)


GOOD = '{"arrival": 5, "prompt_len": 3, "output_len": 4}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"arrival": 5, "prompt_len": 3}', "output_len is missing"),
        (
            '{"arrival": 5, "prompt_len": 3, "output_len": 4, "x": 1}',
            "x is unknown; known: id, arrival",
        ),
        ('{"arrival": 5, "prompt_len": 0, "output_len": 4}', "prompt_len is 0; allowed: 1 to"),
        ('{"arrival": 5, "prompt_len": true, "output_len": 4}', "prompt_len is True"),
        ('{"arrival": -1, "prompt_len": 1, "output_len": 4}', "arrival is -1"),
        ('{"arrival": NaN, "prompt_len": 1, "output_len": 4}', "arrival is nan"),
        ('{"arrival": 4, "prompt_len": 1, "output_len": 4}', "sort the trace"),
        (
            '{"arrival": 5, "prompt_len": 1, "output_len": 4, "lane": "low"}',
            "'low'; allowed: critical",
        ),
        ('{"arrival": 5, "prompt_len": 1, "output_len": 4, "tenant": "a b"}', "tenant"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + line + "\n")
    with pytest.raises(ConfigurationError, match=f"trace.jsonl:2: .*{message}"):
        list(read_trace(path))


def test_a_trace_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="holds no request"):
        list(read_trace(path))


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_trace(iter(()), tmp_path / "none" / "trace.jsonl")


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list(read_trace(tmp_path / "none"))

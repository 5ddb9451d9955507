"""Traces: what is read, what figures mean, and both commands on the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.commands import bench

from penstock.shared.errors import ConfigurationError
from penstock.tools.bench.trace.token_times import TokenTimes
from penstock.tools.bench.trace.trace_file import TraceRequest, read_trace_file
from penstock.tools.rounds import Rounds

GOOD = {"prompt": [5, 6, 7], "output_len": 4, "arrival_unit": 0.5}


def written(folder: Path, body: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def test_a_trace_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = written(tmp_path, {"requests": [GOOD, GOOD | {"output_len": 9}, GOOD]})
    requests = read_trace_file(path, 2)
    assert [request.output_len for request in requests] == [4, 9]
    assert requests[0] == TraceRequest((5, 6, 7), 4, 0.5)
    assert requests[0].arrival_s(None) == 0
    assert requests[0].arrival_s(4) == 0.125
    assert len(read_trace_file(path)) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([GOOD], "needs a list 'requests'"),
        ({"requests": []}, "needs a list 'requests'"),
        ({"requests": [GOOD, 3]}, r"requests\[1\] must be an object"),
        ({"requests": [GOOD | {"prompt": []}]}, r"requests\[0\].prompt"),
        ({"requests": [GOOD | {"prompt": [-1]}]}, r"requests\[0\].prompt"),
        ({"requests": [GOOD | {"prompt": [True]}]}, r"requests\[0\].prompt"),
        ({"requests": [GOOD | {"output_len": 0}]}, r"requests\[0\].output_len"),
        ({"requests": [GOOD | {"output_len": 2.5}]}, r"requests\[0\].output_len"),
        ({"requests": [GOOD | {"arrival_unit": -1}]}, r"requests\[0\].arrival_unit"),
        ({"requests": [{}]}, r"requests\[0\]"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, body: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_trace_file(written(tmp_path, body))


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace_file(tmp_path / "none.json")


def test_figures_of_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = TokenTimes([TraceRequest((1,), 3, 1.0), TraceRequest((1,), 2, 0.0)], rate=1.0)
    for index, tokens, now in ((1, 1, 0.5), (0, 1, 2.0), (1, 1, 2.5), (0, 2, 4.0)):
        monkeypatch.setattr(times, "now", lambda now=now: now)
        times.add(index, tokens)
    rounds = Rounds()
    times.summarise(rounds)
    assert rounds.median("output_tokens_per_s") == 5 / 4
    assert rounds.median("ttft_ms_p50") == 500  # the other one: 2 s less its arrival at 1 s
    assert rounds.median("ttft_ms_p99") == 1000
    assert rounds.median("itl_ms_p50") == 1000  # two tokens after 2 s, and one after 2 s
    assert rounds.median("itl_ms_p99") == 2000
    assert rounds.median("latency_ms_p99") == 3000


@pytest.mark.parametrize("way", [["--in-process"], []])
def test_trace(tmp_path: Path, way: list[str]) -> None:
    path = written(tmp_path, {"requests": [GOOD, GOOD, GOOD]})
    done = bench(
        "trace", str(path), "--rounds", "2", "--rate", "100", "--slots", "2", "--json", *way
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    for name in ("ttft", "itl", "latency"):
        assert figures[f"{name}_ms_p50"] <= figures[f"{name}_ms_p99"]
    assert figures["output_tokens_per_s"] > 0


def test_a_trace_that_does_not_fit_the_model(tmp_path: Path) -> None:
    path = written(tmp_path, {"requests": [GOOD | {"output_len": 100_000}]})
    done = bench("trace", str(path), "--in-process")
    assert done.returncode == 2
    assert "requests[0] has 100003 tokens" in done.stderr


def test_modes(tmp_path: Path) -> None:
    picture = tmp_path / "modes.png"
    done = bench("modes", "--requests", "6", "--tokens", "8", "--slots", "3", "--rounds", "1",
               "--plot", str(picture), "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["none.mean_batch"] == 1
    assert figures["none.vs_none"] == 1
    assert figures["none.utilisation_percent"] == 100
    assert figures["continuous.mean_batch"] > figures["none.mean_batch"]
    assert figures["continuous.useful_percent"] == figures["chunked.useful_percent"] == 100
    assert picture.read_bytes().startswith(b"\x89PNG")

"""``penstock bench serve`` on a running deployment, through Redis and through its gateway."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from gateway.rig import GatewayProcess

from penstock.producer.cli import main
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.tools.bench.options import ServeOptions
from penstock.tools.bench.serving.load_plan import plan_load
from penstock.tools.bench.serving.request_record import RequestRecord, read_goals, summarise

LOAD = ["--model", "letters", "--num-prompts", "6", "--request-rate", "50", "--output-tokens", "5"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", "serve", *LOAD, *arguments, "--json"]) == 0, capsys.readouterr().err
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_the_same_load_through_redis_and_http(
    server: EmbeddedRedis,
    gateway: GatewayProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "latencies.png"
    direct = run(capsys, "--redis", server.url, "--goodput", "e2el:60000", "--plot", str(picture))
    over_http = run(capsys, "--url", gateway.url)
    for facts in (direct, over_http):
        figures = facts["figures"]
        assert (figures["completed"], figures["failed"]) == (6, 0)
        assert figures["total_output_tokens"] == 30
        assert figures["total_input_tokens"] == direct["figures"]["total_input_tokens"] > 0
        assert figures["output_throughput"] == pytest.approx(30 / figures["duration"])
        assert 0 < figures["median_ttft_ms"] <= figures["p99_ttft_ms"] <= figures["p99_e2el_ms"]
    assert direct["figures"]["request_goodput"] == direct["figures"]["request_throughput"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_not_served_is_one_line(
    gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", gateway.url, "--model", "nope"]) != 0
    assert "the model 'nope' does not exist" in capsys.readouterr().err


def test_figures_of_known_times() -> None:
    records = [
        RequestRecord(0.0, [(0.5, 1), (0.7, 2), (1.5, 1)], 10),
        RequestRecord(1.0, [(1.1, 1)], 20),
        RequestRecord(1.0, error="refused"),
    ]
    figures = summarise(records, 2.0, {"ttft": 200.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 5)
    assert figures["output_throughput"] == 2.5
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["mean_tpot_ms"] == pytest.approx(1000 / 3)
    assert figures["mean_itl_ms"] == pytest.approx(500)
    assert figures["p99_e2el_ms"] == pytest.approx(1500)


def test_a_plan_is_a_function_of_its_seed() -> None:
    options = ServeOptions(num_prompts=400, request_rate=20.0, burstiness=4.0, words=3)
    load = plan_load(options)
    assert load == plan_load(options)
    assert load != plan_load(ServeOptions(num_prompts=400, request_rate=20.0, words=3, seed=1))
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(load)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.15)
    assert spread / mean == pytest.approx(1 / math.sqrt(4), rel=0.2)
    assert {len(str(request.prompt).split()) for request in load} == {3}


@pytest.mark.parametrize("goals", ["ttft", "ttft:x", "itl:5", "ttft:1,,e2el:2"])
def test_goals_that_cannot_be_read(goals: str) -> None:
    with pytest.raises(ConfigurationError, match="--goodput"):
        read_goals(goals)

"""The command: what it compares, prints and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from penstock.shared.errors import ConfigurationError
from penstock.tools.simulate.command import simulate

SMALL = ("--requests", "40", "--rate", "20", "--step-ms", "5", "--output", "exp:10")


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, arguments)


def figures(*arguments: str) -> dict[str, float]:
    result = call(*SMALL, "--json", *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert all(check["ok"] for check in report["checks"])
    found: dict[str, float] = report["figures"]
    return found


def test_figures_are_flat_and_named_by_what_differs() -> None:
    found = figures("--workers", "1,2")
    for kind in ("pull", "round_robin", "least_loaded"):
        for workers in (1, 2):
            assert found[f"{kind}_w{workers}_requests"] == 40
            assert found[f"{kind}_w{workers}_ttft_p99_s"] > 0.005
            assert found[f"{kind}_w{workers}_normal_e2e_p50_s"] > 0.005
            assert 0 < found[f"{kind}_w{workers}_utilisation"] <= 1


def test_settings_are_compared() -> None:
    found = figures(
        "--dispatch", "pull", "--max-sequences", "1,8", "--chunk-size", "16,all", "--workers", "1"
    )
    assert found["pull_w1_s1_call_e2e_p99_s"] > found["pull_w1_s8_call_e2e_p99_s"]
    assert found["pull_w1_s8_c16_ttft_mean_s"] > found["pull_w1_s8_call_ttft_mean_s"]


def test_orders_are_compared() -> None:
    found = figures(
        "--dispatch", "round-robin", "--workers", "1", "--policy", "fcfs,sjf", "--max-sequences",
        "4", "--rate", "200", "--output", "exp:20",
    )  # fmt: skip
    assert found["round_robin_w1_sjf_e2e_mean_s"] < 0.9 * found["round_robin_w1_fcfs_e2e_mean_s"]
    found = figures(
        "--dispatch", "round-robin", "--workers", "1", "--policy", "fcfs,edf", "--max-sequences",
        "4", "--rate", "200", "--output", "const:20", "--deadlines", "0.1:2",
    )  # fmt: skip
    assert found["round_robin_w1_edf_late_share"] < found["round_robin_w1_fcfs_late_share"] < 1


def test_chunks_and_preemption_are_compared() -> None:
    """A real cost model: a step's time depends on what is in it."""
    shape = ("--dispatch", "round-robin", "--workers", "1", "--requests", "60", "--rate", "40")
    prompts = ("--prompt", "const:6000", "--output", "const:100", "--max-sequences", "16")
    result = call(
        *shape, *prompts, "--chunk-size", "all,adaptive,off", "--target-itl-ms", "25", "--json"
    )
    found = json.loads(result.output)["figures"]
    p99 = {kind: found[f"round_robin_w1_c{kind}_itl_p99_s"] for kind in ("all", "adaptive", "off")}
    assert p99["adaptive"] < 0.05 < p99["all"] < p99["off"]
    result = call(
        *shape, "--prompt", "const:400", "--output", "const:400", "--kv-blocks", "300",
        "--preemption", "recompute,swap", "--json",
    )  # fmt: skip
    found = json.loads(result.output)["figures"]
    assert found["round_robin_w1_recompute_preemptions"] > 0
    assert found["round_robin_w1_swap_makespan_s"] < found["round_robin_w1_recompute_makespan_s"]


def test_per_worker_scales_the_load() -> None:
    found = figures("--dispatch", "pull", "--workers", "3", "--per-worker")
    assert found["pull_w3_requests"] == 120


def test_a_saved_trace_gives_the_same_figures(tmp_path: Path) -> None:
    path, small = str(tmp_path / "trace.jsonl"), ("--workers", "1", "--kv-blocks", "500")
    assert figures("--save-trace", path, *small) == figures("--trace", path, *small)


def test_a_table_for_people() -> None:
    result = call(*SMALL, "--kv-blocks", "500")
    assert result.exit_code == 0
    assert "least_loaded_w8" in result.output
    assert "critical" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0"), "workers is"),
        (("--workers", "two"), "--workers is 'two'"),
        (("--policy", "lottery"), "--policy is 'lottery'"),
        (("--preemption", "drop"), "'drop' is none of auto, swap, recompute"),
        (("--chunk-size", "some"), "--chunk-size is 'some'"),
        (("--deadlines", "5"), "--deadlines is '5'; allowed: LEAST:MOST"),
        (("--deadlines", "5:1"), "deadlines are 5.0:1.0"),
        (("--workers", "2,2"), "twice"),
        (("--dispatch", "psychic"), "--dispatch is"),
        (("--hardware", "abacus"), "known: a100, cpu, h200"),
        (("--model", "huge"), "known: 70b, 7b, demo"),
        (("--hardware", "cpu"), "choose a larger device"),
        (("--step-ms", "0"), "--step-ms is 0"),
        (("--lanes", "low=1"), "--lanes is 'low=1'"),
        (("--lanes", "batch=-1"), "mix of lanes"),
        (("--tenants", "a=x"), "--tenants is"),
        (("--rate", "0"), "rate is 0"),
        (("--requests", "0"), "requests is 0"),
        (("--burstiness", "-1"), "burstiness is -1"),
        (("--rate", "inf"), "rate is inf"),
        (("--rate", "-5"), "rate is -5"),
        (("--lanes", "normal=nan"), "mix of lanes is 'normal=nan'"),
        (("--tenants", "a=inf"), "mix of tenants"),
        (("--workers", "8.5"), "'8.5' is no whole number"),
        (("--policy", "lottery"), "'lottery' is none of fcfs, sjf"),
        (("--slo-ttft-ms", "-1"), "slo_ttft is -0.001 s"),
        (("--slo-itl-ms", "nan"), "slo_itl is nan s"),
        (("--max-batch-tokens", "5"), "max_batch_tokens is 5, below max_sequences (64)"),
        (("--host-blocks", "1,2"), "one value"),
        (("--step-ms", "5", "--steps", "x"), "--step-ms and --steps are given"),
        (("--steps", "/nowhere"), "/nowhere cannot be read"),
        (("--wake-ms", "-1"), "wake is -0.001"),
        (("--exchange-ms", "-1"), "exchange is -0.001"),
        (("--claim-batch", "0"), "claim_batch is 0"),
        (("--max-sequences", "0"), "max_sequences is 0"),
        (("--chunk-size", "0"), "chunk_size is 0"),
        (("--block-size", "0"), "block_size is 0"),
        (("--calibrate", "/nowhere"), "/nowhere cannot be read"),
        (("--trace", "/nowhere"), "/nowhere cannot be read"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, ConfigurationError), result.output
    assert message in str(result.exception)


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("--requests", "100000000", "--plot", str(tmp_path / "x.png"))
    assert isinstance(result.exception, ConfigurationError)
    assert "pip install 'penstock-llm[plot]'" in str(result.exception)


def test_a_plot_is_a_small_png(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    found = figures("--workers", "1,2", "--plot", str(path), "--kv-blocks", "500")
    assert found["pull_w2_requests"] == 40
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert 5_000 < len(picture) < 200_000


def test_a_plot_into_nowhere_is_refused(tmp_path: Path) -> None:
    result = call(*SMALL, "--dispatch", "pull", "--plot", str(tmp_path / "none" / "plot.png"))
    assert isinstance(result.exception, ConfigurationError)
    assert "cannot be written" in str(result.exception)

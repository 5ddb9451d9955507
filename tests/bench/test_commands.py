"""``penstock bench`` in its smallest form: real parts, few tokens, and the pinned names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench.commands import bench

from penstock.gpu_worker.model.checkpoints.checkpoint_quantizer import (
    QuantizeOptions,
    quantize_checkpoint,
)
from penstock.shared.policy_name import PolicyName
from penstock.tools.bench.queue.client_process import ages_of, stamp

QUEUE = {
    "worker_cpu_us_per_token_256", "unpipelined_ratio_256", "redis_cpu_us_per_token_256",
    "round_trips_per_step", "step_ms_p99_256", "submit_to_claim_ms_p99",
    "token_to_subscriber_ms_p99_10k", "bytes_per_queued_request", "bytes_per_streamed_token",
}  # fmt: skip


def report(*arguments: str) -> dict[str, Any]:
    """What a run says; its exit code must agree with its checks."""
    done = bench(*arguments, "--json")
    assert done.stdout, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if all(check["ok"] for check in facts["checks"]) else 1)
    assert all(isinstance(value, int | float) for value in facts["figures"].values())
    for check in facts["checks"]:
        assert check["value"] == facts["figures"][check["name"]]
    for name, (low, high) in facts.get("spread", {}).items():
        assert low <= facts["figures"][name] <= high
    return facts


def test_scheduler() -> None:
    facts = report(
        "scheduler", "--running", "4,8", "--waiting", "0,50", "--rounds", "3", "--steps", "5"
    )
    steps = {"step_us_4_0", "step_us_4_50", "step_us_8_0", "step_us_8_50"}
    orders = tuple(PolicyName)
    admissions = {f"policy_us_{name}_{count}" for name in orders for count in (0, 50)}
    sizes = {f"bytes_per_waiting_request_{name}" for name in orders[1:]}
    assert facts["figures"].keys() == steps | admissions | sizes | {
        "bytes_per_waiting_request", "other_cpu_cores", "reference_loop_ms",
    }  # fmt: skip
    assert {check["name"]: check["limit"] for check in facts["checks"]} == {
        "step_us_4_0": 104, "step_us_4_50": 104, "step_us_8_0": 108, "step_us_8_50": 108,
        **dict.fromkeys(admissions, 50),
    }  # fmt: skip
    assert 200 < facts["figures"]["bytes_per_waiting_request"] < 10_000
    assert any("4 running, against 0 waiting: x" in note for note in facts["notes"])


def test_batcher() -> None:
    facts = report("batcher", "--rates", "40", "--seconds", "0.3", "--batch-ms", "2")
    modes = ("unbatched", "size", "window", "adaptive", "asyncio")
    names = ("requests_per_s", "p50_ms", "p99_ms", "mean_batch")
    assert facts["figures"].keys() == {f"{mode}.r40.{name}" for mode in modes for name in names} | {
        "adaptive_over_unbatched.throughput", "adaptive_over_asyncio.throughput",
        "adaptive_over_window.p50", "other_cpu_cores", "reference_loop_ms",
    }  # fmt: skip
    assert facts["figures"]["unbatched.r40.mean_batch"] == pytest.approx(1)


def test_queue() -> None:
    facts = report(
        "queue", "--rounds", "2", "--steps", "5", "--submits", "3", "--seconds", "0.1",
        "--queued", "1000",
    )  # fmt: skip
    figures = facts["figures"]
    assert figures.keys() >= QUEUE
    assert {check["name"] for check in facts["checks"]} == {
        name for name in QUEUE if not name.startswith("bytes_per_")
    }
    assert 1 <= figures["round_trips_per_step"] < 1.5
    assert figures["tenant_done_after_pulls_ideal"] == 15
    assert figures["tenant_b_done_after_pulls"] <= 15
    assert figures["tenant_c_done_after_pulls"] <= 15
    assert figures["bytes_per_queued_request"] > figures["bytes_per_queued_request_payload"] > 200


def test_tokens_published_together_are_told_apart() -> None:
    before = stamp()
    older, younger = ages_of(before + stamp())
    assert 0 <= younger < older < 10**9


@pytest.mark.slow
def test_embed() -> None:
    facts = report("embed", "--texts", "16", "--clients", "4", "--rounds", "1", "--threads", "1")
    figures = facts["figures"]
    ours = figures["clients_per_s"]
    assert math.isclose(
        figures["times_one_call"], ours / figures["encode_one_call_per_s"], rel_tol=0.05
    )
    assert figures["clients_ms_p50"] <= figures["clients_ms_p99"]
    assert [check["name"] for check in facts["checks"]] == ["times_one_by_one"]


@pytest.mark.slow
def test_engine() -> None:
    facts = report(
        "engine", "--batches", "1,2", "--tokens", "4", "--rounds", "1", "--requests", "4",
        "--slots", "2", "--threads", "1",
    )  # fmt: skip
    figures = facts["figures"]
    for name in ("1", "2", "mixed"):
        ours, theirs = figures[f"tokens_per_s_{name}"], figures[f"transformers_tokens_per_s_{name}"]
        assert math.isclose(figures[f"speedup_{name}"], ours / theirs)
        assert figures[f"step_ms_{name}"] > 0
    slow, fast = facts["spread"]["tokens_per_s_in_process"]
    slow_redis, fast_redis = facts["spread"]["tokens_per_s_through_redis"]
    low, high = 100 * (slow / fast_redis - 1), 100 * (fast / slow_redis - 1)
    assert low <= figures["redis_cost_percent"] <= high
    assert figures["redis_cost_cpu_percent"] > -100
    assert figures["cores_beside_worker"] > 0
    assert [(check["name"], check["limit"]) for check in facts["checks"]] == [
        ("redis_cost_percent", 3),
        ("speedup_mixed", 2),
    ]
    assert any("1 CPU thread for the engine" in note for note in facts["notes"])


@pytest.mark.slow
def test_engine_in_number_formats(tmp_path: Path) -> None:
    copy = tmp_path / "a-copy"
    quantize_checkpoint("demo", copy, QuantizeOptions(method="fp8"), lambda *_: None)
    facts = report(
        "engine", "--quantization", "int8,int4", "--checkpoints", str(copy), "--batches", "1,2",
        "--tokens", "8", "--rounds", "1", "--threads", "1", "--exactness",
    )  # fmt: skip
    figures = facts["figures"]
    assert figures["weights_mb_int4"] < figures["weights_mb_int8"] < figures["weights_mb_bfloat16"]
    for name in ("int8_1", "int4_1", "int8_2", "int4_2"):
        full = figures[f"tokens_per_s_bfloat16_{name[-1]}"]
        assert math.isclose(figures[f"speedup_{name}"], figures[f"tokens_per_s_{name}"] / full)
        assert figures[f"read_floor_percent_{name}"] > 0
    for name in ("int8", "int4", "a-copy"):
        assert figures[f"speedup_{name}_1"] > 0
        assert figures[f"tokens_equal_percent_{name}"] > 99
        assert 0.9 < figures[f"perplexity_ratio_{name}"] < 1.1
    assert figures["tokens_as_full_percent_int4"] < figures["tokens_as_full_percent_int8"] <= 100
    assert len(facts["notes"]) == 6


def test_chunking(tmp_path: Path) -> None:
    picture = tmp_path / "gaps.png"
    facts = report(
        "chunking", "--prompt", "200", "--streams", "2", "--rounds", "1", "--threads", "1",
        "--plot", str(picture),
    )  # fmt: skip
    figures = facts["figures"]
    for name in ("adaptive", "unchunked"):
        over = figures[f"itl_p99_ms_{name}"] / figures["target_itl_ms"]
        assert math.isclose(figures[f"itl_p99_over_target_{name}"], over)
        assert figures[f"itl_p50_ms_{name}"] <= figures[f"itl_p99_ms_{name}"]
    assert figures["prompt_steps_unchunked"] == 1 < figures["prompt_steps_adaptive"]
    assert [check["name"] for check in facts["checks"]] == [
        "itl_p99_over_target_adaptive", "itl_p99_over_target_unchunked",
    ]  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_preempt() -> None:
    facts = report(
        "preempt", "--contexts", "40", "--requests", "4", "--rounds", "1", "--threads", "1",
        "--pool-percent", "60",
    )  # fmt: skip
    figures = facts["figures"]
    assert figures["swapped_share_swap_40"] == 1
    assert figures["swapped_share_recompute_40"] == figures["swapped_mib_recompute_40"] == 0
    assert figures["preemptions_swap_40"] > 0
    assert figures["computed_tokens_swap_40"] < figures["computed_tokens_recompute_40"]
    times = {mode: figures[f"cpu_s_{mode}_40"] for mode in ("swap", "recompute", "auto")}
    better = min(times["swap"], times["recompute"])
    assert math.isclose(figures["auto_over_better_40"], times["auto"] / better)
    assert math.isclose(figures["recompute_over_swap_40"], times["recompute"] / times["swap"])
    assert [(check["name"], check["limit"]) for check in facts["checks"]] == [
        ("auto_over_better_40", 1.1), ("auto_over_better_displaced", 1.1),
    ]  # fmt: skip
    assert figures["preemptions_recompute_displaced"] > 0


def test_prefix() -> None:
    facts = report(
        "prefix", "--requests", "5", "--shared", "64", "--own", "3", "--tokens", "2",
        "--slots", "2", "--rounds", "1", "--threads", "1",
    )  # fmt: skip
    figures = facts["figures"]
    # All but the first find the whole blocks of what they share.
    assert math.isclose(figures["hit_rate"], 4 * 64 / (5 * 67))
    saved = figures["computed_tokens_uncached"] - figures["computed_tokens_cached"]
    assert saved == 4 * 64
    assert math.isclose(figures["speedup"], figures["cpu_s_uncached"] / figures["cpu_s_cached"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("scheduler", "--running", "0"), "--running: got [0]; allowed: 1 or more"),
        (("scheduler", "--waiting", "a"), "got 'a'; allowed: whole numbers with commas between"),
        (("queue", "--queued", "10"), "--queued: got 10; allowed: 1000 or more"),
        (("queue", "--seconds", "0"), "--seconds: got 0.0; allowed: above 0"),
        (("queue", "--redis", "redis://127.0.0.1:1"), "cannot measure redis://127.0.0.1:1"),
        (("queue", "--redis", "redis://127.0.0.1/0?timeuot=1"), "it has no option timeuot"),
        (("chunking", "--target-itl-ms", "0"), "--target-itl-ms: got 0.0; allowed: above 0"),
        (("prefix", "--shared", "0"), "--shared: got 0; allowed: 1 or more"),
        (("preempt", "--contexts", "8"), "--contexts: got [8]; allowed: 16 or more"),
        (("preempt", "--pool-percent", "0"), "--pool-percent: got 0; allowed: 1 to 100"),
        (("engine", "--batches", "1,-1"), "--batches: got [1, -1]; allowed: 1 or more"),
        (("engine", "--quantization", "int8,q4"), "--quantization: got 'q4'; allowed"),
        (("engine", "--exactness"), "--exactness: it needs --quantization"),
        (("engine", "--checkpoints", "a/x,b/x"), "--checkpoints: the name 'x' comes twice"),
        (("engine", "--checkpoints", "a/bfloat16"), "the name 'bfloat16' comes twice"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_simulator(tmp_path: Path) -> None:
    """A worker whose steps take 20 ms: what the simulator learns of it, and what it makes of it."""
    facts = report(
        "simulator", "--model", "synthetic", "--synthetic-step-ms", "20", "--loads", "50",
        "--seconds", "2", "--lesson-seconds", "1", "--slots", "4", "--output", "uniform:2:8",
        "--prompt", "uniform:4:40", "--keep", str(tmp_path),
    )  # fmt: skip
    figures = facts["figures"]
    for name in ("ttft_p50_s", "itl_mean_s", "throughput_tps", "makespan_s"):
        for label in ("simulated", "at_pace"):
            real, simulated = figures[f"{name}_50"], figures[f"{name}_{label}_50"]
            error = figures[f"{name}_{label}_error_percent_50"]
            assert math.isclose(error, 100 * (simulated / real - 1), abs_tol=1e-9)
    assert figures["requests_50"] >= 20
    assert figures["itl_p50_s_50"] >= 0.02
    # Steps of a fixed time are learned whatever else the machine does, and who arrives when rules.
    assert abs(figures["makespan_s_at_pace_error_percent_50"]) < 50
    assert 0.25 < figures["pace_50"] < 4
    assert {check["name"] for check in facts["checks"]} >= {"ttft_p99_s_at_pace_error_percent_50"}
    trace, steps = tmp_path / "load-50.jsonl", tmp_path / "steps.jsonl"
    assert len(trace.read_text().splitlines()) == figures["requests_50"]
    assert len(steps.read_text().splitlines()) >= 50


def test_spec() -> None:
    facts = report(
        "spec", "--batches", "1", "--tokens", "8", "--rounds", "1", "--length", "2",
        "--threads", "1",
    )  # fmt: skip
    figures = facts["figures"]
    for name in ("b1", "edit", "hot"):
        rates = {mode: figures[f"{mode}.{name}"] for mode in ("plain", "ngram", "draft", "auto")}
        assert math.isclose(figures[f"auto_vs_plain.{name}"], rates["auto"] / rates["plain"])
        best = max(rate for mode, rate in rates.items() if mode != "auto")
        assert math.isclose(figures[f"auto_vs_best.{name}"], rates["auto"] / best)
    assert 0 < figures["acceptance.draft.b1.p1"] <= 1
    assert {check["name"]: check["limit"] for check in facts["checks"]} == {
        **{f"auto_vs_best.{name}": 0.97 for name in ("b1", "edit", "hot")},
        **{f"auto_vs_plain.{name}": 0.97 for name in ("edit", "hot")},
        "auto_vs_plain.b1": 1.6, "ngram_vs_plain.edit": 2.0,
    }  # fmt: skip


def test_spec_of_a_shape_accepts_what_it_is_told_to() -> None:
    facts = report(
        "spec", "--shape", "small", "--acceptance", "0.6", "--batches", "2", "--tokens", "64",
        "--rounds", "2", "--threads", "1",
    )  # fmt: skip
    figures = facts["figures"]
    assert not any("ngram" in name for name in figures)
    assert abs(figures["acceptance.draft.b2.p1"] - 0.6) < 0.15
    assert abs(figures["acceptance.draft.b2.p2"] - 0.36) < 0.15
    assert facts["notes"][0].startswith("SYNTHETIC: random weights in float32 on cpu")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--shape", "70b"), "allowed: 7b, small"),
        (("--acceptance", "1.5"), "--acceptance: got 1.5; allowed: 0 to 1"),
        (("--device", "cuda"), "--device cuda: a GPU's time is not the process's; add --clock"),
    ],
)
def test_spec_says_what_it_takes(given: tuple[str, str], says: str) -> None:
    done = bench("spec", *given)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())

"""`penstock verify`: models that pass, and planted bugs that it finds."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model.families import REFUSED, VOCAB_SIZE, WINDOW, others_slow

from penstock.gpu_worker.model.forward import attention
from penstock.gpu_worker.model.kv.layer_groups import windows_of_groups
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.sampling import sampler
from penstock.producer.cli.app import main
from penstock.shared.errors import ConfigurationError, ModelNotFound, UnsupportedModel
from penstock.tools.report import Report
from penstock.tools.verify import verification
from penstock.tools.verify.greedy import Greedy
from penstock.tools.verify.hf_reference import Reference
from penstock.tools.verify.options import VerifyOptions
from penstock.tools.verify.verification import verify_model

Checkpoint = Callable[[str], Path]
Verify = Callable[..., Report]

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "cohere2",
    "gpt2",
    "opt",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
]


@pytest.fixture(scope="module")
def verify(tmp_path_factory: pytest.TempPathFactory) -> Verify:
    """`verify_model` on few prompts and a short text."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("The water runs through the pipe, and the wheel turns.\n" * 4)

    def run(folder: Path, **changes: Any) -> Report:
        options: dict[str, Any] = {
            "prompts_count": 6,
            "max_tokens": 12,
            "text_file": text,
            "context": 64,
            "device": "cpu",
            "threads": 1,
        }
        return verify_model(VerifyOptions(model=str(folder), **{**options, **changes}))

    return run


# --- models that must pass, and models that must be refused ----------------------------------


@pytest.mark.parametrize(
    "model_type", others_slow(FAMILIES, ("gemma2", "opt", "gpt_oss", "deepseek_v3"))
)
def test_families_give_here_what_they_give_in_transformers(
    verify: Verify, checkpoint: Checkpoint, model_type: str
) -> None:
    report = verify(checkpoint(model_type))
    figures = report.figures
    assert report.ok, report
    assert figures["tokens_compared"] == figures["rounds"] * 6 * 12
    assert figures["tokens_equal"] + figures["tokens_tied"] == figures["tokens_compared"]
    assert 0 < figures["max_rel_logit_diff"] <= 1e-4
    assert figures["perplexity"] == pytest.approx(figures["perplexity_transformers"], rel=1e-4)
    # What was verified is mixed batches, preemption and the prefix cache, not only a lone prompt.
    assert figures["mixed_steps"] > 0
    assert figures["widest_step"] > 2
    assert figures["preemptions"] > 0
    assert figures["swapped_blocks"] > 0
    loaded = load_model(checkpoint(model_type), device="cpu")
    windows = windows_of_groups(loaded.geometry, loaded.max_model_len)
    loaded.close()
    assert figures["kv_pools"] == len(windows)
    assert (figures["steps_past_windows"] > 0) == (windows != (None,))
    assert figures["prefix_hit_tokens"] > 0
    assert figures["longest_sequence"] > 2 * WINDOW


def test_the_demo_model_passes(verify: Verify) -> None:
    report = verify(Path("demo"), prompts_count=4, max_tokens=8, text_file=None, context=256)
    assert report.ok, report
    assert report.figures["tokens_equal"] == report.figures["rounds"] * 4 * 8


def test_a_model_rounded_at_load_is_compared_with_the_rounded_and_the_full_weights(
    verify: Verify, checkpoint: Checkpoint
) -> None:
    options: dict[str, Any] = {"prompts_count": 2, "max_tokens": 4}
    full = verify(checkpoint("llama"), **options).figures
    report = verify(checkpoint("llama"), quantization="int4", kv_cache_dtype="fp8", **options)
    figures = report.figures
    assert report.ok, report
    assert figures["perplexity_full"] == pytest.approx(full["perplexity_transformers"], rel=1e-5)
    ratio = figures["perplexity_transformers"] / figures["perplexity_full"]
    assert figures["perplexity_ratio_to_full"] == pytest.approx(ratio, rel=1e-5)
    assert abs(ratio - 1) > 1e-3
    assert 0.3 < figures["token_agreement_with_full"] <= 1
    # Against transformers over the rounded weights, too.
    assert abs(figures["kv_fp8_perplexity_ratio"] - 1) < 0.1
    assert figures["kv_fp8_token_agreement"] > 0.8
    assert figures["kv_fp8_median_rel_logit_diff"] > figures["max_rel_logit_diff"]


def test_only_a_small_model_is_computed_by_one_thread(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native library has taken its weights by then, and they count all the same."""
    loaded = load_model("demo", device="cpu")
    size = loaded.multiplied_weights
    loaded.close()
    assert size > 1_000_000
    found: list[int] = []

    def note(*_: Any) -> Report:
        found.append(torch.get_num_threads())
        return Report("", {}, (), ())

    monkeypatch.setattr(verification, "_verify", note)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for limit in (size, size + 1):
            monkeypatch.setattr(verification, "_SMALL", limit)
            verify(Path("demo"), threads=None)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found == [2, 1]


def test_another_seed_verifies_on_other_prompts_and_the_same_seed_on_the_same(
    verify: Verify,
    checkpoint: Checkpoint,
) -> None:
    folder = checkpoint("llama")
    first, again, other = (verify(folder, seed=seed, prompts_count=3).figures for seed in (5, 5, 6))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert first["perplexity"] == pytest.approx(other["perplexity"], rel=1e-6)
    assert first["steps"] != other["steps"]


def test_half_precision_has_limits_of_its_own(verify: Verify, checkpoint: Checkpoint) -> None:
    report = verify(checkpoint("llama"), dtype="bfloat16")
    assert report.ok, report
    assert {check.name for check in report.checks} == {
        "modes_missing",
        "logit_error_ratio",
        "perplexity_rel_diff",
    }
    assert report.figures["max_rel_logit_diff"] > 1e-3  # so other limits are needed
    assert 0 < report.figures["logit_error_ratio"] < 1.5  # less where activations stay in float32
    assert any("bfloat16 equal tokens are reported but not required" in n for n in report.notes)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs are planted in Python, which a step of the native library does not run."""
    monkeypatch.setattr(verification, "load_model", partial(load_model, native="off"))


@pytest.mark.usefixtures("by_torch")
def test_a_bug_is_found_in_half_precision_too(
    verify: Verify, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verification.load_reference

    def after_loading(loaded: LoadedModel) -> Reference:
        in_attention(lambda kw: kw.update(window=WINDOW + 1))(monkeypatch)
        return right(loaded)

    monkeypatch.setattr(verification, "load_reference", after_loading)
    report = verify(checkpoint("mistral"), dtype="bfloat16", prompts_count=3)
    assert not report.ok
    assert report.figures["logit_error_ratio"] > 5


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_the_gate_refuses_are_not_verified(
    verify: Verify, checkpoint: Checkpoint, model_type: str
) -> None:
    with pytest.raises(UnsupportedModel, match="is not supported"):
        verify(checkpoint(model_type))


def test_a_missing_model_is_named(verify: Verify, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        verify(tmp_path / "nowhere")


def test_defaults_of_the_checkpoint_for_generation_play_no_part(
    verify: Verify, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """EOS and penalties in generation_config.json would end or bend the reference."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2"), folder)
    settings = {"eos_token_id": list(range(VOCAB_SIZE)), "repetition_penalty": 5.0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    report = verify(folder, prompts_count=4)
    assert report.ok, report
    assert report.figures["tokens_equal"] == report.figures["rounds"] * 4 * 12


# --- bugs that must be found ------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def in_attention(change: Callable[[dict[str, Any]], None]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = attention.paged_attention

        def wrong(*args: Any, **kwargs: Any) -> Any:
            change(kwargs)
            return right(*args, **kwargs)

        monkeypatch.setattr(attention, "paged_attention", wrong)

    return plant


def lose_some_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.write_kv

    def wrong(
        key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **options: Any
    ) -> None:
        if len(slots) > 1:  # a lone decode is stored, the last token of every other step is not
            right(key[:-1], value[:-1], key_cache, value_cache, slots[:-1], **options)
        else:
            right(key, value, key_cache, value_cache, slots, **options)

    monkeypatch.setattr(attention, "write_kv", wrong)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LoadedModel.__getattribute__

    def wrong(self: LoadedModel, name: str) -> Any:
        value = right(self, name)
        if name != "model":
            return value
        return lambda *args, position_ids, **kwargs: value(
            *args, position_ids=position_ids + 1, **kwargs
        )

    monkeypatch.setattr(LoadedModel, "__getattribute__", wrong)


def second_best_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, logits: torch.Tensor) -> list[int]:
        best = logits.topk(2, dim=-1)
        close = best.values[:, 0] - best.values[:, 1] < 0.05 * best.values[:, 0]
        chosen: list[int] = torch.where(close, best.indices[:, 1], best.indices[:, 0]).tolist()
        return chosen

    monkeypatch.setattr(sampler.Sampler, "most_likely", wrong)


@pytest.mark.parametrize(
    ("model_type", "plant", "found_by"),
    [
        ("gemma2", in_attention(lambda kw: kw.update(softcap=None)), "max_rel_logit_diff"),
        ("mistral", in_attention(lambda kw: kw.update(window=None)), "max_rel_logit_diff"),
        ("mistral", in_attention(lambda kw: kw.update(window=WINDOW + 1)), "max_rel_logit_diff"),
        ("gpt_oss", in_attention(lambda kw: kw.update(sinks=None)), "max_rel_logit_diff"),
        ("granite", in_attention(lambda kw: kw.update(scale=0.25)), "max_rel_logit_diff"),
        ("llama", lose_some_kv, "max_rel_logit_diff"),
        ("gpt2", shift_positions, "max_rel_logit_diff"),
        ("llama", second_best_token, "tokens_mismatched"),
    ],
    ids=["softcap", "window", "window off by one", "sinks", "scale", "kv", "positions", "sampler"],
)
@pytest.mark.usefixtures("by_torch")
def test_planted_bugs_are_found(
    verify: Verify,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    plant: Plant,
    found_by: str,
) -> None:
    right = verification.load_reference

    def after_loading(loaded: LoadedModel) -> Reference:
        # The load gate would refuse some of these bugs at once; here verify must find them.
        reference = right(loaded)
        plant(monkeypatch)
        return reference

    monkeypatch.setattr(verification, "load_reference", after_loading)
    report = verify(checkpoint(model_type), prompts_count=4)
    assert not report.ok
    assert found_by in {check.name for check in report.checks if not check.ok}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("by_torch")
def test_logits_that_are_no_numbers_fail(
    verify: Verify, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    right = verification.compare_greedy

    def then_poison(loaded: LoadedModel, *rest: Any) -> Greedy:
        result = right(loaded, *rest)
        loaded.model.lm_head.register_forward_hook(lambda *_: _[2].fill_(math.nan))
        return result

    monkeypatch.setattr(verification, "compare_greedy", then_poison)
    report = verify(checkpoint("llama"), prompts_count=2, dtype=dtype)
    earlier = {"tokens_mismatched", "modes_missing"}
    assert not any(check.ok for check in report.checks if check.name not in earlier)
    assert "NaN" not in json.dumps(report.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": 0}, "--max-tokens: got 0; allowed: 1 or more"),
        ({"prompts_count": 0}, "--prompts-count: got 0; allowed: 1 or more"),
        ({"context": 1}, "--context: got 1; allowed: 2 or more"),
        ({"seed": -1}, "--seed: got -1; allowed: 0 or more"),
        ({"threads": 0}, "--threads: got 0; allowed: 1 or more"),
        ({"prompts_file": Path("x"), "prompts_count": 2}, "leave one of the two out"),
        ({"dtype": "float8"}, "dtype: got 'float8'"),
        ({"device": "tpu"}, "device: got 'tpu'"),
        ({"quantization": "int8", "full": Path("x")}, "--full: the full model is --model itself"),
        ({"kv_cache_dtype": "e5m2"}, "--kv-cache-dtype: got 'e5m2'; allowed: int8, fp8"),
        ({"max_tokens": 256}, "--max-tokens: got 256; allowed: below 256"),
    ],
)
def test_bad_options_are_refused(
    verify: Verify, checkpoint: Checkpoint, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        verify(checkpoint("llama"), **changes)


def test_a_window_that_no_sequence_crossed_is_noted(
    verify: Verify, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("[5, 6]\n[7]\n")
    folder = checkpoint("mistral")
    report = verify(folder, prompts_file=prompts, prompts_count=None, max_tokens=3, context=5)
    assert report.ok
    assert any(f"window of {WINDOW} tokens was not crossed" in note for note in report.notes)
    assert not verify(folder, prompts_count=1).notes


# --- the report and the command line --------------------------------------------------------------


def test_command_prints_one_json_object(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(checkpoint("llama")), "--prompts-count", "3", "--max-tokens", "6"]
    assert main(["verify", *arguments, "--context", "32", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert {"tokens_compared", "tokens_equal", "max_rel_logit_diff", "perplexity"} <= set(
        found["figures"]
    )
    figures = found["figures"]
    assert figures["tokens_equal"] == figures["tokens_compared"] == figures["rounds"] * 3 * 6
    assert all(check["ok"] for check in found["checks"])


def test_command_refuses_with_one_line_and_exit_code_2(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--model", str(checkpoint("bloom")), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "model type bloom) is not supported" in err

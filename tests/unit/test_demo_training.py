"""The script that trains the demo model: its corpus, its windows, its resumption."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("target", "draft")

sys.path.insert(0, str(ROOT / "scripts"))

import train_demo_model  # noqa: E402
from demo_model import corpus, training  # noqa: E402
from demo_model.batches import WindowSampler  # noqa: E402


@pytest.mark.slow
def test_smoke_run_writes_a_model_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "model"
    script = ROOT / "scripts" / "train_demo_model.py"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--threads", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(out / "target", local_files_only=True)
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(out / name, local_files_only=True)
        assert model.config.vocab_size == len(tokenizer) == 384
    assert "| target |" in (out / "README.md").read_text()


@pytest.mark.parametrize("option", ["--steps", "--minutes", "--rate", "--threads"])
def test_script_refuses_a_number_that_is_not_positive(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_demo_model.main(["--out", "unused", option, "-1"])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert f"{option} -1" in message
    assert "must be above 0" in message


@pytest.fixture(scope="module")
def documents() -> list[corpus.Document]:
    return corpus.load_documents()


def test_corpus_has_the_language_and_the_library(documents: list[corpus.Document]) -> None:
    keys = {document.key for document in documents}
    assert {"topic:assert", "builtin:str", "textwrap:textwrap.wrap", "module:json"} <= keys
    assert not any(key.startswith(("test.", "idlelib.", "lib2to3.")) for key in keys)
    size = sum(len(document.plain) for document in documents)
    assert 1_500_000 < size < 4_000_000
    texts = [entry.text for document in documents for entry in document.entries]
    assert len(texts) == len(set(texts))


def test_split_is_stable_and_about_a_twentieth(documents: list[corpus.Document]) -> None:
    held_out = {document.key for document in documents if document.held_out}
    assert {"builtin:zip", "_pydecimal:_pydecimal.Clamped"} <= held_out
    assert 0.03 < len(held_out) / len(documents) < 0.07


def test_answers_are_whole_paragraphs() -> None:
    text = "\n\n".join(letter * 50 for letter in "abcd")
    assert corpus.shorten(text, limit=120) == "a" * 50 + "\n\n" + "b" * 50
    assert corpus.shorten("x" * 500, limit=120) == "x" * 500


def test_an_epoch_shows_every_window_once() -> None:
    sampler = WindowSampler([list(range(100, 300)), list(range(300, 500))], 9, 2, seed=3)
    seen = torch.cat([sampler.batch(i) for i in range(sampler.batches_per_epoch)])
    assert len(seen.unique()) == seen.numel() > 300
    again = WindowSampler([list(range(100, 300)), list(range(300, 500))], 9, 2, seed=3)
    assert torch.equal(again.batch(25), sampler.batch(25))
    assert not torch.equal(sampler.batch(0), sampler.batch(sampler.batches_per_epoch))


def tiny_trainer(path: Path, **options: Any) -> training.Trainer:
    model = training.build_model(
        layers=1, hidden=16, heads=2, kv_heads=1, intermediate=16, vocab=64, context=32,
        bos=1, eos=2, pad=0, seed=5,
    )  # fmt: skip
    schedule = training.Schedule(
        steps=6,
        phases=(training.Phase((8,), 0.5), training.Phase((8, 16), 1.0)),
        tokens_per_step=32,
        checkpoint_seconds=0.0,
    )
    text = [[(7 * i + j) % 58 + 6 for j in range(40)] for i in range(20)]
    return training.Trainer("tiny", model, text, schedule, path, **options)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = tiny_trainer(tmp_path / "whole.pt")
    whole.run()

    calls = []

    def interrupt(_: Any) -> float:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        tiny_trainer(tmp_path / "parts.pt", validate=interrupt).run()
    rest = tiny_trainer(tmp_path / "parts.pt")
    assert rest.resume()
    assert rest.step == 4
    rest.run()
    assert rest.step == whole.step == 6
    for ours, theirs in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_divergence_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "bad.pt")
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(training.DivergenceError, match=r"loss nan at step 1 .* lower --rate"):
        trainer.run()

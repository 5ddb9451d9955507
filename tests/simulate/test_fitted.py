"""Costs fitted to a worker's log of steps."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.gpu_worker.engine.scheduling.step_features import StepFeatures
from penstock.gpu_worker.engine_process.step_log import StepLog
from penstock.shared.errors import ConfigurationError
from penstock.tools.simulate import HARDWARE, MODELS, Roofline
from penstock.tools.simulate.fitted_step_time import MeasuredStep, fit_costs, read_steps

DEVICE = Roofline(HARDWARE["cpu"], MODELS["demo"])
COSTS = (6e-3, 1e-4, 3e-4, 1e-3, 1e-6, 1e-7)


def steps(count: int, noise: float = 0.0) -> list[MeasuredStep]:
    """Decodes of 1 to 16 sequences, every third with a chunk of a prompt."""
    rng = random.Random(1)
    made = []
    for index in range(count):
        sequences = rng.randint(1, 16)
        chunk = rng.randint(10, 200) if index % 3 == 0 else 0
        context = sequences * rng.randint(20, 400)
        pairs = context + chunk * (chunk + 1) / 2
        work = StepFeatures(sequences + chunk, context, pairs, sequences, chunks=int(chunk > 0))
        amounts = (1, work.tokens, work.sequences, work.chunks, work.context, work.pairs)
        seconds = sum(cost * amount for cost, amount in zip(COSTS, amounts, strict=True))
        made.append(MeasuredStep(work, seconds * rng.lognormvariate(0.0, noise)))
    return made


def test_costs_are_found_again() -> None:
    cost = fit_costs(steps(300), DEVICE)
    found = (
        cost.step_s, cost.token_s, cost.sequence_s, cost.chunk_s, cost.context_s, cost.pair_s
    )  # fmt: skip
    assert found == pytest.approx(COSTS, rel=0.01)


def test_all_steps_together_take_what_they_took() -> None:
    """However much steps of equal work differ: else a simulated worker would be too fast."""
    noisy = steps(2000, noise=0.5)
    cost = fit_costs(noisy, DEVICE)
    took = sum(step.seconds for step in noisy)
    assert sum(cost.seconds(step.work) for step in noisy) == pytest.approx(took, rel=1e-3)


def test_no_cost_is_below_zero() -> None:
    """Where longer contexts happened to be faster, they cost nothing."""
    upside_down = [replace(step, seconds=1 / (1 + step.work.context)) for step in steps(300)]
    assert fit_costs(upside_down, DEVICE).context_s == 0


def test_what_the_log_does_not_tell_is_the_devices() -> None:
    cost = fit_costs(steps(60), DEVICE)
    assert (cost.context, cost.kv_blocks(16)) == (DEVICE.context, DEVICE.kv_blocks(16))
    assert cost.swap_seconds(100) == DEVICE.swap_seconds(100)


def test_steps_that_do_not_tell_enough_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="49 steps without swaps; needed: 50"):
        fit_costs(steps(49), DEVICE)
    drafted = [replace(step, work=replace(step.work, drafts=2)) for step in steps(60)]
    with pytest.raises(ConfigurationError, match=r"speculation\.source 'off'"):
        fit_costs(drafted, DEVICE)


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    made = steps(5)
    for half in (made[:2], made[2:]):  # a worker that starts again goes on with its log
        log = StepLog(path)
        for step in half:
            log.write(step.work, step.seconds)
        log.close()
    assert [step.work for step in read_steps(path)] == [step.work for step in made]
    assert [step.seconds for step in read_steps(path)] == pytest.approx(
        [step.seconds for step in made], abs=1e-7
    )


def test_a_full_disk_ends_the_log_and_not_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"))
    for _ in range(3):
        log.write(StepFeatures(1, 1, 1.0, 1), 0.01)
    log.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "/dev/full" in caplog.text


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"worker\.step_log .* cannot be written"):
        StepLog(tmp_path / "none" / "steps.jsonl")


GOOD = {"seconds": 0.01, **asdict(StepFeatures(1, 1, 1.0, 1))}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a step"),
        (json.dumps({"seconds": 1}), "not a step"),
        (json.dumps({**GOOD, "tokens": 0}), "tokens is 0; allowed: numbers from 1 on"),
        (json.dumps({**GOOD, "seconds": -1}), "seconds is -1; allowed: numbers from 0 on"),
        (json.dumps({**GOOD, "pairs": "many"}), "pairs is 'many'"),
        (json.dumps({**GOOD, "context": True}), "context is True"),
    ],
)
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ConfigurationError) as refusal:
        read_steps(path)
    assert str(refusal.value).startswith(f"{path}:2: ")
    assert message in str(refusal.value)

"""Log-probabilities: those of the model's distribution, in whatever company."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.gpu_worker.model.sampling import gumbel_sampling
from penstock.gpu_worker.model.sampling.sampler import INVALID_TOKEN, Sampler, SamplingBatch
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions


@dataclass(eq=False)
class Row:
    options: SamplingOptions
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int = 1
    num_output_tokens: int = 0
    choice: int = 0
    num_candidates: int = 0


def row(seed: int = 0, **options: Any) -> Row:
    return Row(SamplingOptions(**options), seed, [1])


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 4


def report(
    logits: torch.Tensor, rows: list[Row]
) -> tuple[list[int], dict[int, TokenLogprobs] | None]:
    batch = SamplingBatch.from_sequences(rows, logits.device)
    tokens = Sampler().sample(logits, batch)
    found = Sampler().report(logits, batch, tokens)
    return tokens.tolist(), None if found is None else found.by_row()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [12, 300, 70_000])
def test_figures_are_those_of_log_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(6, vocab_size).to(dtype)
    rows = [row(i, logprobs=(0, 1, 5, 20)[i % 4], temperature=1.7, top_p=0.9) for i in range(6)]
    tokens, found = report(logits, rows)
    assert found is not None
    exact = logits.double().log_softmax(-1)
    for i, token in enumerate(tokens):
        assert found[i].logprob == pytest.approx(float(exact[i, token]), abs=2e-6)
        wanted = min(rows[i].options.logprobs or 0, vocab_size)
        assert len(found[i].top) == wanted
        for (token_id, value), likely in zip(found[i].top, exact[i].topk(wanted)[0], strict=True):
            assert value == pytest.approx(float(exact[i, token_id]), abs=2e-6)
            assert value == pytest.approx(float(likely), abs=2e-6)


def test_they_are_taken_before_everything_that_options_do() -> None:
    logits = random_logits(1, 40)
    plain, changed = (
        row(logprobs=4),
        row(logprobs=4, temperature=0.2, allowed_token_ids=(7,), repetition_penalty=3.0, top_k=1),
    )
    _, before = report(logits, [plain])
    tokens, after = report(logits, [changed])
    assert before is not None
    assert after is not None
    assert tokens == [7]
    assert after[0].top == before[0].top
    assert after[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[7]), abs=2e-6)


def test_a_row_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(24, 501)
    rows = [row(i, logprobs=(None, 3, 20)[i % 3]) for i in range(24)]
    _, together = report(logits, rows)
    alone = {}
    for i in range(24):
        _, found = report(logits[i : i + 1].clone(), [rows[i]])
        if found is not None:
            alone[i] = found[0]
    assert together == alone
    monkeypatch.setattr(gumbel_sampling, "_SLICE_ELEMENTS", {"cpu": 5 * 501})
    assert report(logits, rows)[1] == together


def test_nobody_asks_nobody_pays() -> None:
    assert report(random_logits(2, 9), [row(), row(temperature=0)])[1] is None
    assert SamplingBatch.from_sequences([row()], "cpu").reported is None


def test_equals_come_by_id_and_what_is_impossible_not_at_all() -> None:
    logits = torch.full((1, 30), -math.inf)
    logits[0, 20], logits[0, 4], logits[0, 9] = 1.0, 1.0, 0.0
    _, found = report(logits, [row(logprobs=20, temperature=0)])
    assert found is not None
    assert [token_id for token_id, _ in found[0].top] == [4, 20, 9]


def test_a_row_without_distribution_does_not_harm_the_others() -> None:
    logits = random_logits(3, 50)
    rows = [row(i, logprobs=2) for i in range(3)]
    _, before = report(logits, rows)
    logits[1, 3] = math.nan
    tokens, after = report(logits, rows)
    assert tokens[1] == INVALID_TOKEN
    assert before is not None
    assert after is not None
    assert (after[0], after[2]) == (before[0], before[2])

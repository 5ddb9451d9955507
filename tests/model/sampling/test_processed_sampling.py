"""Tokens drawn behind processors and masks: their frequencies, their cost, their order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model.sampling.goodness_of_fit import chi_square, chi_square_quantile
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.gpu_worker.model.sampling.sampler import NO_TOKEN_LEFT, Sampler, SamplingBatch
from penstock.shared.protocol.sampling_options import SamplingOptions

VOCAB = 60
PROMPT = [3, 4, 5]


@dataclass(eq=False)
class Row:
    chosen: SamplingOptions
    seed: int = 42
    num_output_tokens: int = 0
    num_prompt_tokens: int = 3
    num_candidates: int = 0
    choice: int = 0
    reads: int = 0

    @property
    def token_ids(self) -> list[int]:
        return PROMPT

    @property
    def options(self) -> SamplingOptions:
        self.reads += 1
        return self.chosen


def mask_of(allowed: set[int]) -> torch.Tensor:
    words = torch.zeros(-(-VOCAB // 32), dtype=torch.int64)
    for token_id in allowed:
        words[token_id // 32] |= 1 << (token_id % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(7)).expand(rows, -1)


ALLOWED = set(range(0, VOCAB, 3)) | {4, 31, 32, 59}


def theirs(options: SamplingOptions, logits: torch.Tensor, *, masked: bool) -> torch.Tensor:
    """Probabilities by transformers' processors, and the mask where it stands in the order."""
    made = LogitsProcessorList()
    if options.logit_bias:
        made.append(SequenceBiasLogitsProcessor([[[i], b] for i, b in options.logit_bias.items()]))
    if options.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.banned_token_ids:
        made.append(NoBadWordsLogitsProcessor([[i] for i in options.banned_token_ids]))
    scores = made(torch.tensor([PROMPT]), logits.clone())
    if masked:
        scores[:, [i for i in range(VOCAB) if i not in ALLOWED]] = -math.inf
    after = LogitsProcessorList([TemperatureLogitsWarper(options.temperature)])
    if options.top_k:
        after.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        after.append(TopPLogitsWarper(options.top_p))
    warped: torch.Tensor = after(torch.tensor([PROMPT]), scores)
    return warped[0].double().softmax(-1)


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({"repetition_penalty": 2.0}, False),
        ({"logit_bias": {5: 1.5, 9: -1.0}, "temperature": 0.8}, False),
        ({"banned_token_ids": [1, 2, 30], "top_p": 0.8}, False),
        ({"regex": "a"}, True),
        ({"regex": "a", "top_k": 10, "temperature": 0.7}, True),
        ({"regex": "a", "top_p": 0.8, "repetition_penalty": 1.5, "banned_token_ids": [3]}, True),
    ],
    ids=str,
)
def test_drawn_frequencies_follow_the_distribution(options: dict[str, Any], masked: bool) -> None:
    """Pearson's chi-square at significance 0.001 against transformers' processors."""
    draws, chosen = 5_000, SamplingOptions(**options)
    rows = [Row(chosen, num_output_tokens=index) for index in range(draws)]
    logits = logits_of(draws)
    masks = [mask_of(ALLOWED)] * draws if masked else ()
    tokens = Sampler().sample(logits, SamplingBatch.from_sequences(rows, "cpu"), masks)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    expected = theirs(chosen, logits[:1], masked=masked) * draws
    possible = expected > 0
    assert float(counts[~possible].sum()) == 0
    often = possible & (expected > 5)
    statistic = chi_square(counts[often], expected[often])
    assert statistic < chi_square_quantile(int(often.sum()) - 1)


def test_only_what_a_mask_allows_is_drawn_in_its_own_row() -> None:
    constrained, plain = SamplingOptions(regex="a"), SamplingOptions(repetition_penalty=1.2)
    rows = [Row((constrained, plain)[i % 2], seed=i) for i in range(40)]
    masks = [mask_of({i, i + 1}) for i in range(0, 40, 2)]
    tokens = Sampler().sample(logits_of(40), SamplingBatch.from_sequences(rows, "cpu"), masks)
    assert all(tokens[i] in (i, i + 1) for i in range(0, 40, 2))
    alone = Sampler().sample(logits_of(20), SamplingBatch.from_sequences(rows[1::2], "cpu"))
    assert tokens[1::2].tolist() == alone.tolist()


def test_a_mask_that_allows_nothing_fails_its_row_alone() -> None:
    rows = [Row(SamplingOptions(regex="a"), seed=i) for i in range(3)]
    masks = [mask_of({1}), mask_of(set()), mask_of({2})]
    tokens = Sampler().sample(logits_of(3), SamplingBatch.from_sequences(rows, "cpu"), masks)
    assert tokens.tolist() == [1, NO_TOKEN_LEFT, 2]


def test_a_batch_that_stays_reads_no_options() -> None:
    """What options say is put into tensors once, and not looked at again, step after step."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 5, "logprobs": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logit_bias": {4: 2.0}, "banned_token_ids": [7]},
        {"regex": "a"},
    ]
    rows = [Row(SamplingOptions(**kinds[i % len(kinds)]), seed=i) for i in range(30)]
    masks = [mask_of(ALLOWED)] * 5
    batch = SamplingBatch.from_sequences(rows, "cpu")
    Sampler().sample(logits_of(30), batch, masks)
    for row in rows:
        row.reads = 0
    for _ in range(3):
        batch = SamplingBatch.from_sequences(rows, "cpu", batch)
        tokens = Sampler().sample(logits_of(30), batch, masks)
        Sampler().report(logits_of(30), batch, tokens)
    assert sum(row.reads for row in rows) == 0

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.sampling.goodness_of_fit import chi_square, chi_square_quantile
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.gpu_worker.model.sampling import gumbel_sampling, random_numbers
from penstock.gpu_worker.model.sampling.sampler import INVALID_TOKEN, Sampler, SamplingBatch
from penstock.shared.protocol.sampling_options import SamplingOptions


@dataclass
class Row:
    options: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    num_output_tokens: int = 0
    choice: int = 0
    num_candidates: int = 0


def row(*, seed: int = 0, index: int = 0, **options: float) -> Row:
    return Row(SamplingOptions(**options), seed, index)  # type: ignore[arg-type]


def sample(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    batch = SamplingBatch.from_sequences(rows, logits.device)
    return Sampler().sample(logits, batch).tolist()


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * scale


def test_rounding_does_not_change_the_token():
    """Logits that differ a little, as they do by less from batch to batch, give nearly always the
    same: in one of 2,000 draws here. The inverse of the distribution moves in one of 20."""
    logits = random_logits(64, 4096, 9)
    rounded = logits * (1 + 1e-4 * torch.randn(logits.shape, generator=torch.manual_seed(0)))
    differing = total = 0
    for index in range(40):
        rows = [row(seed=64 * index + i) for i in range(64)]
        found, again = sample(logits, rows), sample(rounded, rows)
        differing += sum(a != b for a, b in zip(found, again, strict=True))
        total += 64
    assert total == 2560
    assert differing <= 10


# --- choosing -------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -math.inf, -1.0]])
    assert sample(logits, [row(temperature=0), row(temperature=0)]) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_agrees_with_argmax(dtype):
    logits = random_logits(16, 1000, 0).to(dtype)
    assert sample(logits, [row(temperature=0)] * 16) == logits.argmax(-1).tolist()


def test_all_greedy_prepares_nothing():
    assert SamplingBatch.from_sequences([row(temperature=0)] * 3, "cpu").sampled == ()


def kept(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Which tokens can be drawn: what the ranking gives a weight, bool [V]."""
    scores = (logits - logits.max()).div(options.temperature).unsqueeze(0)
    filters = gumbel_sampling.Filters.from_options([options], logits.device)
    if filters is None:
        return torch.ones(len(logits), dtype=torch.bool)
    width = min(max(options.top_k + 1, 256), len(logits))
    ranking = gumbel_sampling.rank(scores, filters, width)
    if not bool(ranking.covered.all()):
        ranking = gumbel_sampling.rank(scores, filters, len(logits))
    mask = torch.zeros(len(logits), dtype=torch.bool)
    mask[ranking.ids[ranking.weights > 0]] = True
    return mask


MIXES = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.5, "top_k": 40, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.999},  # wider than the first look of 256 candidates
    {"temperature": 1.0, "top_k": 700, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 2**31 - 1},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.5, "min_p": 1e-3},  # wider than the first look of 256 candidates
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.99, "min_p": 0.02},
]


def warp(logits: torch.Tensor, chosen: SamplingOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers makes of logits ``[1, V]``: before top-p, and in the end."""
    warped = TemperatureLogitsWarper(chosen.temperature)(None, logits)  # type: ignore[arg-type]
    if chosen.top_k:
        warped = TopKLogitsWarper(chosen.top_k)(None, warped)  # type: ignore[arg-type]
    before_top_p = warped
    if chosen.top_p < 1:
        warped = TopPLogitsWarper(chosen.top_p)(None, warped)  # type: ignore[arg-type]
    if chosen.min_p > 0:
        warped = MinPLogitsWarper(chosen.min_p)(None, warped)  # type: ignore[arg-type]
    return before_top_p, warped


@pytest.mark.parametrize("options", MIXES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_filters_keep_what_transformers_keeps(options, seed):
    chosen = SamplingOptions(**options)
    logits = random_logits(1, 2000, seed)
    before_top_p, warped = warp(logits, chosen)
    ours, theirs = kept(logits[0], chosen), warped[0] > -math.inf
    # Their sums are in float32: a token may differ only where its mass meets top_p to 1e-5, or
    # where its share of the most likely token's probability meets min_p to 1e-5 of that.
    for token in (ours != theirs).nonzero().flatten().tolist():
        probabilities = before_top_p[0].double().softmax(-1)
        before = float(probabilities[probabilities > probabilities[token]].sum())
        share = float(probabilities[token] / probabilities.max())
        assert abs(before - chosen.top_p) < 1e-5 or abs(share - chosen.min_p) < 1e-5 * share
    assert bool(ours[logits[0].argmax()])


def test_the_comparison_with_transformers_can_fail():
    logits = random_logits(1, 2000, 0)
    theirs = TopPLogitsWarper(0.9)(None, logits)[0] > -math.inf  # type: ignore[arg-type]
    ours = kept(logits[0], SamplingOptions(top_p=0.8))
    assert int(theirs.sum()) != int(ours.sum())
    _, theirs = warp(logits, SamplingOptions(min_p=0.1))
    ours = kept(logits[0], SamplingOptions(min_p=0.2))
    assert int((theirs[0] > -math.inf).sum()) != int(ours.sum())


def test_top_k_keeps_ties_and_top_p_breaks_them_by_id():
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert kept(logits, SamplingOptions(top_k=2)).tolist() == [True, True, True, True, False]
    flat = torch.zeros(10)
    assert kept(flat, SamplingOptions(top_p=0.35)).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert kept(flat, SamplingOptions(top_k=3, top_p=0.35)).sum() == 4  # top-k keeps all ten


def test_top_p_of_exactly_one_keeps_every_token_that_has_weight():
    logits = random_logits(1, 5000, 3, scale=1.0)[0]
    assert bool(kept(logits, SamplingOptions(top_p=1.0)).all())


def test_top_p_over_ties_wider_than_the_candidates():
    logits = torch.zeros(1000)
    logits[700:] = -1e-3
    assert kept(logits, SamplingOptions(top_p=0.5)).nonzero().flatten().tolist() == list(range(500))
    assert int(kept(logits, SamplingOptions(top_k=10)).sum()) == 700


def test_top_p_counts_ties_of_top_k_that_min_p_drops():
    logits = torch.full((3000,), -3.0)
    logits[100], logits[200] = 0.0, -0.5
    # Top-p keeps both of the whole that top-k left, but one of what the first 256 candidates show.
    options = SamplingOptions(top_k=5, top_p=0.05, min_p=0.1)
    assert kept(logits, options).nonzero().flatten().tolist() == [100, 200]


EXTREMES = [0, 1, 2**61, 2**62 - 2, 2**62 - 1]


@pytest.mark.parametrize("bits", EXTREMES)
def test_a_filtered_token_is_never_picked_whatever_the_bits(monkeypatch, bits):
    monkeypatch.setattr(random_numbers, "uniform_bits", lambda seeds, *_: seeds * 0 + bits)
    for position in (0, 3, 7):
        logits = torch.zeros(1, 8)
        logits[0, position] = 5.0
        assert sample(logits, [row(top_k=1)]) == [position]
        assert sample(logits, [row(top_p=0.01)]) == [position]
    masked = torch.full((1, 8), -math.inf)
    masked[0, 2], masked[0, 5] = 1.0, 1.0
    assert sample(masked, [row()])[0] in (2, 5)


@pytest.mark.parametrize("options", MIXES, ids=str)
def test_widening_the_look_does_not_change_the_outcome(monkeypatch, options):
    logits = random_logits(12, 3000, 6)
    rows = [row(seed=i, **options) for i in range(12)]
    narrow = sample(logits, rows)
    monkeypatch.setattr(gumbel_sampling, "_CANDIDATES", 3000)  # sorts at once
    assert sample(logits, rows) == narrow


def test_extreme_temperatures():
    logits = random_logits(1, 100, 5)
    best = int(logits.argmax())
    assert sample(logits, [row(temperature=1e-300)]) == [best]
    assert sample(logits * 1e30, [row(temperature=1e-30)]) == [best]
    assert sample(logits * 5e36, [row(temperature=10)]) == [best]


# --- rows that have no distribution ---------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_a_broken_row_is_flagged_and_leaves_the_others_alone(options, bad):
    logits = random_logits(4, 300, 1)
    rows = [row(seed=seed, **options) for seed in range(4)]
    before = sample(logits, rows)
    if bad == "all -inf":
        logits[2] = -math.inf
    else:
        logits[2, 17] = bad
    assert sample(logits, rows) == [*before[:2], INVALID_TOKEN, before[3]]


def test_a_wrong_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="3 rows of logits, 2 sequences"):
        sample(torch.zeros(3, 8), [row(), row()])


# --- reproducibility ------------------------------------------------------------------------

_options = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.1, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.2, 1e-4]),
)
_rows = st.lists(
    st.builds(Row, _options, st.integers(0, 2**63 - 1), st.integers(0, 2**17)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rows=_rows, seed=st.integers(0, 10), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_does_not_depend_on_the_others(rows, seed, dtype):
    logits = random_logits(len(rows), 501, seed).to(dtype)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(len(rows))]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_slices_do_not_change_the_outcome(monkeypatch):
    logits = random_logits(40, 257, 2)
    rows = [row(seed=i, top_p=(1.0, 0.8)[i % 2]) for i in range(40)]
    whole = sample(logits, rows)
    monkeypatch.setattr(gumbel_sampling, "_SLICE_ELEMENTS", {"cpu": 3 * 257})
    assert sample(logits, rows) == whole


def test_the_previous_batch_is_used_again_only_for_the_same_sequences():
    rows = [row(seed=1), row(seed=2, top_k=4), row(temperature=0)]
    first = SamplingBatch.from_sequences(rows, "cpu")
    for sequence in rows:
        sequence.num_output_tokens += 1
    again = SamplingBatch.from_sequences(rows, "cpu", first)
    assert again.samplers is first.samplers
    logits = random_logits(3, 400, 8)
    fresh = SamplingBatch.from_sequences(rows, "cpu")
    assert torch.equal(Sampler().sample(logits, again), Sampler().sample(logits, fresh))
    swapped = SamplingBatch.from_sequences([rows[1], rows[0], rows[2]], "cpu", again)
    assert swapped.samplers is not first.samplers
    fewer = SamplingBatch.from_sequences(rows[:2], "cpu", again)
    assert len(fewer.sequences) == 2


def test_logits_are_not_changed():
    logits = random_logits(2, 50, 4)
    copy = logits.clone()
    sample(logits, [row(top_k=3), row(temperature=0.5)])
    assert torch.equal(logits, copy)


# --- distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"top_k": 10},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.15},
    ],
    ids=str,
)
def test_drawn_frequencies_follow_the_distribution(options):
    """Pearson's chi-square at significance 0.001 against transformers' processors."""
    draws, chosen = 20_000, SamplingOptions(**options)
    logits = random_logits(1, 60, 11, scale=1.0)
    rows = [Row(chosen, 42, index) for index in range(draws)]
    counts = torch.bincount(
        torch.tensor(sample(logits.expand(draws, -1), rows)), minlength=60
    ).double()
    _, warped = warp(logits, chosen)
    expected = warped[0].double().softmax(-1) * draws
    possible = expected > 0
    assert float(counts[~possible].sum()) == 0
    assert float(expected[possible].min()) > 5
    statistic = chi_square(counts[possible], expected[possible])
    assert statistic < chi_square_quantile(int(possible.sum()) - 1)

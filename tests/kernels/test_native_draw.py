"""Tokens drawn by the native library, against the sampler's PyTorch functions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import SETS, pool
from torch import Tensor

from penstock.gpu_worker.model.sampling.gumbel_sampling import Filters, SampledRows, draw, weights
from penstock.gpu_worker.model.sampling.random_numbers import DrawKeys, gumbel
from penstock.kernels.cpu import Draws
from penstock.shared.protocol.sampling_options import SamplingOptions

WHOLE = SamplingOptions(temperature=0.8)
NARROWED = [
    SamplingOptions(temperature=0.7, top_p=0.95),
    SamplingOptions(temperature=1.0, top_p=0.3),
    SamplingOptions(temperature=0.9, top_k=7),
    SamplingOptions(temperature=1.3, top_k=40, top_p=0.8),
    SamplingOptions(temperature=1.0, min_p=0.05),
    SamplingOptions(temperature=1.0, top_k=300, top_p=0.999, min_p=0.001),
    SamplingOptions(temperature=5.0, top_p=0.9),
    SamplingOptions(temperature=1e-30, top_p=0.9),
]


def sampled_rows(options: list[SamplingOptions], rows: list[int], seed: int) -> SampledRows:
    generator = torch.Generator().manual_seed(seed)
    count = len(rows)
    keys = DrawKeys(
        torch.randint(2**62, (count,), generator=generator),
        torch.randint(4, (count,), generator=generator),
        torch.randint(1000, (count,), generator=generator),
        stream=seed % 2,
    )
    temperature = torch.tensor([[each.temperature] for each in options])
    filters = Filters.from_options(options, torch.device("cpu"))
    return SampledRows(torch.tensor(rows), temperature, filters, keys)


def drawn(name: str, logits: Tensor, sampled: SampledRows, threads: int = 2) -> Tensor:
    keys, filters = sampled.keys, sampled.filters
    limits = () if filters is None else (filters.top_k, filters.top_p, filters.log_min_p)
    draws = Draws(
        sampled.rows, sampled.temperature, keys.seeds, keys.choices, keys.indexes, keys.stream,
        *limits,
    )  # fmt: skip
    return pool(name, threads).draw(logits, logits.max(-1).values, draws)


def advantages(logits: Tensor, sampled: SampledRows, tokens: Tensor) -> Tensor:
    """By how much score and noise of each row's best token exceed those of ``tokens``.

    Infinite for a token that may not be drawn.
    """
    largest = logits.max(-1).values
    kept = weights(logits, largest, sampled) > 0
    rows = sampled.rows
    scores = (logits[rows] - largest[rows].unsqueeze(1)) / sampled.temperature
    ids = torch.arange(logits.shape[1])
    sums = scores + gumbel(sampled.keys.bits(logits.device), ids)
    sums.masked_fill_(~kept, -math.inf)
    return sums.max(-1).values - sums.gather(1, tokens.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 1000, 5003])
@pytest.mark.parametrize("name", SETS)
def test_tokens_are_the_samplers(name: str, columns: int) -> None:
    different = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(NARROWED), columns, generator=generator) * (seed + 1)
        logits[0, columns // 2 + 1 :] = -math.inf  # forbidden
        rows = list(range(len(NARROWED)))
        for options in (NARROWED, [WHOLE] * len(NARROWED)):
            sampled = sampled_rows(options, rows, seed)
            tokens = drawn(name, logits, sampled)
            # Rounding decides between tokens that are equal to the last digits, and no others.
            assert float(advantages(logits, sampled, tokens).max()) < 1e-5
            different += int((tokens != draw(logits, logits.max(-1).values, sampled)).sum())
    assert different <= 1


@pytest.mark.parametrize("name", SETS)
def test_equal_logits(name: str) -> None:
    """Of tokens that are equally likely top-p keeps the first ones, top-k and min-p all."""
    logits = torch.zeros(1, 1000)
    limits = [
        (SamplingOptions(temperature=1.0, top_p=0.25), 250),
        (SamplingOptions(temperature=1.0, top_k=3), 1000),
        (SamplingOptions(temperature=1.0, top_k=3, top_p=0.5), 500),
        (SamplingOptions(temperature=1.0, min_p=0.5), 1000),
    ]
    for options, count in limits:
        rows = (sampled_rows([options], [0], seed) for seed in range(300))
        found = [int(drawn(name, logits, sampled)) for sampled in rows]
        assert max(found) < count
        assert len(set(found)) > 100


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_row_and_options(data: st.DataObject) -> None:
    """Also few distinct logits, so that many tie at every limit."""
    columns = data.draw(st.integers(1, 200), "columns")
    seed = data.draw(st.integers(0, 2**31), "seed")
    generator = torch.Generator().manual_seed(seed)
    distinct = data.draw(st.sampled_from([1, 2, 5, 1000]), "distinct")
    logits = torch.randint(distinct, (2, columns), generator=generator).float() / 7
    options = [
        SamplingOptions(
            temperature=data.draw(st.sampled_from([1e-3, 0.1, 1.0, 2.0])),
            top_k=data.draw(st.integers(0, 250)),
            top_p=data.draw(st.floats(0.001, 1.0)),
            min_p=data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])),
        )
        for _ in range(2)
    ]
    sampled = sampled_rows(options, [1, 0], seed)
    tokens = drawn(SETS[data.draw(st.integers(0, len(SETS) - 1))], logits, sampled)
    assert float(advantages(logits, sampled, tokens).max()) < 1e-5


@pytest.mark.parametrize("name", SETS)
def test_a_row_depends_on_itself_alone(name: str) -> None:
    """Neither on its neighbours nor on threads nor on how far apart rows are."""
    logits = torch.randn(len(NARROWED), 3001, generator=torch.Generator().manual_seed(1)) * 3
    rows = list(range(len(NARROWED)))
    sampled = sampled_rows(NARROWED, rows, 5)
    together = drawn(name, logits, sampled).tolist()
    wide = torch.full((len(NARROWED), 4000), 100.0)
    wide[:, 500:3501] = logits
    assert drawn(name, wide[:, 500:3501], sampled, threads=1).tolist() == together
    for row in rows:
        keys = sampled.keys
        own = DrawKeys(
            keys.seeds[row : row + 1], keys.choices[row : row + 1], keys.indexes[row : row + 1],
            keys.stream,
        )  # fmt: skip
        filters = Filters.from_options([NARROWED[row]], torch.device("cpu"))
        alone = SampledRows(torch.tensor([0]), sampled.temperature[row : row + 1], filters, own)
        assert drawn(name, logits[row : row + 1], alone).tolist() == [together[row]]


def test_instruction_sets_with_fma_draw_the_same() -> None:
    logits = torch.randn(len(NARROWED), 2000, generator=torch.Generator().manual_seed(2)) * 2
    found = {
        tuple(drawn(name, logits, sampled_rows(NARROWED, list(range(len(NARROWED))), 9)).tolist())
        for name in SETS
        if name != "portable"
    }
    assert len(found) <= 1


@pytest.mark.parametrize("name", SETS)
def test_frequencies_are_the_probabilities(name: str) -> None:
    """A chi-square of 20,000 draws; its 99.99th percentile at 9 degrees of freedom is 33.7."""
    count = 20_000
    logits = torch.linspace(0, 2.5, 10).repeat(count, 1)
    sampled = sampled_rows([WHOLE] * count, list(range(count)), 3)
    found = drawn(name, logits, sampled).bincount(minlength=10).double()
    expected = (logits[0].double() / WHOLE.temperature).softmax(-1) * count
    assert float(((found - expected) ** 2 / expected).sum()) < 33.7


@pytest.mark.parametrize("name", SETS)
def test_rows_without_a_distribution_spoil_no_other(name: str) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    expected = drawn(name, logits, sampled_rows([WHOLE] * 4, [0, 1, 2, 3], 1)).tolist()
    logits[0, 5], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    for options in (WHOLE, NARROWED[3]):
        found = drawn(name, logits, sampled_rows([options] * 4, [0, 1, 2, 3], 1)).tolist()
        assert found[:3] == [0, 0, 0]
        if options is WHOLE:
            assert found[3] == expected[3]


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        drawn(SETS[0], torch.zeros(2, 3, dtype=torch.float64), sampled_rows([WHOLE], [0], 1))
    with pytest.raises(ValueError, match="not there"):
        drawn(SETS[0], torch.zeros(2, 3), sampled_rows([WHOLE], [2], 1))
    with pytest.raises(ValueError, match="cannot be"):
        pool(SETS[0]).draw(
            torch.zeros(2, 0),
            torch.zeros(2),
            Draws(*(torch.zeros(0, dtype=torch.int64),) * 5, stream=0),
        )

"""Random numbers that are a function of their key: the same everywhere, and random enough."""

from __future__ import annotations

import pytest
import torch
from model.sampling.goodness_of_fit import chi_square, chi_square_quantile

from penstock.gpu_worker.model.sampling.random_numbers import (
    gumbel,
    philox4x32,
    uniform,
    uniform_bits,
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # published with the generator (Random123, kat_vectors)
        (
            (0x00000000, 0x00000000, 0x00000000, 0x00000000),
            (0x00000000, 0x00000000),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert tuple(words.squeeze(1).tolist()) == expected


def test_philox_columns_are_independent_of_each_other():
    generator = torch.Generator().manual_seed(1)
    counter = torch.randint(0, 2**32, (4, 50), generator=generator)
    key = torch.randint(0, 2**32, (2, 50), generator=generator)
    alone = [philox4x32(counter[:, i : i + 1], key[:, i : i + 1]) for i in range(50)]
    assert torch.equal(philox4x32(counter, key), torch.cat(alone, dim=1))


def test_uniform_is_in_range_and_flat():
    indexes = torch.arange(20_000)
    draws = uniform(torch.full_like(indexes, 7), torch.zeros_like(indexes), indexes)
    assert draws.dtype == torch.float64
    assert 0 <= float(draws.min()) < 1e-3
    assert 1 - 1e-3 < float(draws.max()) < 1
    counts = torch.histc(draws, bins=100, min=0, max=1)
    assert chi_square(counts, torch.full((100,), 200.0)) < chi_square_quantile(99)


def test_every_part_of_the_key_matters():
    seeds = torch.tensor([5, 6, 5 + 2**32, 5, 5, 2**63 - 1])
    choices = torch.tensor([0, 0, 0, 1, 0, 0])
    indexes = torch.tensor([9, 9, 9, 9, 10, 9])
    bits = uniform_bits(seeds, choices, indexes)
    assert len(set(bits.tolist())) == 6
    assert int(bits.min()) >= 0


def test_noise_is_a_tokens_own_wherever_it_stands():
    bits = uniform_bits(torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.arange(4) * 7)
    whole = gumbel(bits, torch.arange(5000))
    some = torch.tensor([[3, 4999, 77]]).expand(4, 3)
    assert torch.equal(gumbel(bits, some), whole[:, [3, 4999, 77]])
    assert torch.equal(gumbel(bits[2:3], some[:1]), whole[2:3, [3, 4999, 77]])


@pytest.mark.parametrize("rows", [1, 400])
def test_noise_has_gumbels_distribution(rows):
    """Along the tokens of a row, and along the rows of a token: Kolmogorov-Smirnov, 0.1 %."""
    count = 200_000 // rows
    indexes = torch.arange(rows)
    bits = uniform_bits(torch.full_like(indexes, 11), torch.zeros_like(indexes), indexes)
    noise = gumbel(bits, torch.arange(count)).double()
    assert torch.isfinite(noise).all()
    for sample_of in (noise.flatten(), noise[:, 0] if rows > 1 else noise[0]):
        ordered = torch.exp(-torch.exp(-sample_of)).sort().values
        ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
        assert float((ordered - ranks).abs().max()) < 1.95 / len(ordered) ** 0.5 + 1 / len(ordered)


def test_noise_of_neighbours_is_uncorrelated():
    """Neighbouring tokens, rows that follow each other, tokens and rows at once."""
    indexes = torch.arange(300)
    bits = uniform_bits(torch.full_like(indexes, 3), torch.zeros_like(indexes), indexes)
    noise = gumbel(bits, torch.arange(1000)).double()
    noise = (noise - noise.mean()) / noise.std()
    bound = 5 / noise[1:, 1:].numel() ** 0.5  # five standard deviations
    for shifted in (noise[:-1, 1:], noise[1:, :-1]):
        assert float((noise[:-1, :-1] * shifted).mean().abs()) < bound
    assert float((noise[:-1, :-1] * noise[1:, 1:]).mean().abs()) < bound

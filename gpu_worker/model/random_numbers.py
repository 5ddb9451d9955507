"""Counter-based random numbers: a draw is a pure function of (seed, choice, index).

Nothing is carried from draw to draw, so a request sees the same numbers whoever shares its batch,
whichever worker continues it and on whichever device. The generator is Philox4x32-10 (Salmon,
Moraes, Dror and Shaw, SC'11, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BITS", "philox4x32", "scaled_draw", "uniform", "uniform_bits"]

BITS = 62
"""Random bits per draw: the most for which :func:`scaled_draw` stays inside int64."""

_MASK = 0xFFFFFFFF
_HALF = BITS // 2
_HALF_MASK = (1 << _HALF) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10.

    Args:
        counter: int64 ``[4, N]``, each a 32-bit word.
        key: int64 ``[2, N]``, each a 32-bit word.

    Returns:
        int64 ``[4, N]``, each a 32-bit word, on the device of the arguments.
    """
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device).unsqueeze(1)
    weyl = torch.tensor(_WEYL, device=counter.device).unsqueeze(1)
    even, odd = counter[0::2], counter[1::2]
    for step in range(_ROUNDS):
        # 32 x 32 -> 64 bits by halves of 16: a whole product would overflow int64.
        low = multipliers * (even & 0xFFFF)
        high = multipliers * (even >> 16)
        product_high = (high + (low >> 16)) >> 16
        product_low = (low + ((high & 0xFFFF) << 16)) & _MASK
        round_key = (key + step * weyl) & _MASK
        even, odd = product_high.flip(0) ^ odd ^ round_key, product_low.flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform_bits(seeds: Tensor, choices: Tensor, indexes: Tensor, stream: int = 0) -> Tensor:
    """One draw of :data:`BITS` random bits per row.

    Args:
        seeds: int64 ``[N]`` in ``[0, 2**63)``.
        choices: int64 ``[N]`` in ``[0, 2**32)``: which of a request's parallel outputs.
        indexes: int64 ``[N]`` in ``[0, 2**32)``: index of the token in that output.
        stream: numbers of another stream have nothing to do with these; in ``[0, 2**32)``.

    Returns:
        int64 ``[N]`` in ``[0, 2**62)``.
    """
    nothing = torch.zeros_like(indexes)
    words = philox4x32(
        torch.stack((indexes, choices, nothing + stream, nothing)),
        torch.stack((seeds & _MASK, seeds >> 32)),
    )
    return ((words[0] >> 1) << _HALF) | (words[1] >> 1)


def uniform(seeds: Tensor, choices: Tensor, indexes: Tensor, stream: int = 0) -> Tensor:
    """The draws of :func:`uniform_bits` as float64 ``[N]`` in ``[0, 1)``; never 1."""
    return (uniform_bits(seeds, choices, indexes, stream) >> (BITS - 53)).double() * 2.0**-53


def scaled_draw(bits: Tensor, total: Tensor) -> Tensor:
    """``floor(bits * total / 2**62)``, exactly: an integer in ``[0, total)``.

    Args:
        bits: int64 ``[N]`` in ``[0, 2**62)``.
        total: int64 ``[N]`` in ``[1, 2**62]``.
    """
    bits_high, bits_low = bits >> _HALF, bits & _HALF_MASK
    total_high, total_low = total >> _HALF, total & _HALF_MASK
    # Each cross product is below 2**62, so that their sum fits into int64.
    cross = bits_high * total_low + bits_low * total_high + ((bits_low * total_low) >> _HALF)
    return bits_high * total_high + (cross >> _HALF)

"""Counter-based random numbers: a draw is a pure function of (seed, choice, index).

Draws share no state. So a request sees the same numbers in every batch, on every worker that
continues it, and on every device. The generator is Philox4x32-10 (Salmon,
Moraes, Dror and Shaw, SC'11, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BITS", "DrawKeys", "gumbel", "philox4x32", "uniform", "uniform_bits"]

BITS = 62
"""Random bits per draw."""

_MASK = 0xFFFFFFFF
_HALF = BITS // 2
_HALF_MASK = (1 << _HALF) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MIX = (0x7FEB352D, 0x846CA68B - (1 << 32))
_BELOW_ONE = 1 - 2.0**-24


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """What names the random numbers of ``R`` draws; on the host.

    Attributes:
        seeds: int64 ``[R]`` in ``[0, 2**63)``.
        choices: int64 ``[R]`` in ``[0, 2**32)``: which of a request's outputs.
        indexes: int64 ``[R]`` in ``[0, 2**32)``: index of the token in its output.
        stream: which of a token's streams of random numbers.
    """

    seeds: Tensor
    choices: Tensor
    indexes: Tensor
    stream: int = 0

    def bits(self, device: torch.device) -> Tensor:
        """Random bits int64 ``[R]``, see :func:`uniform_bits`."""
        # Drawn on the host, where the indexes are: a step sends one small tensor to the device.
        bits = uniform_bits(self.seeds, self.choices, self.indexes, self.stream)
        return bits.to(device, non_blocking=True)


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


def gumbel(bits: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise of each token of each row: ``-log(-log(u))`` of uniform numbers of their own.

    A row's bits key a hash of the token id. So a token has the same noise at any place and beside
    any others. Philox for each token would cost ten times as much, and no user's secret hangs on
    it. One round of the mixer of Wellons (2018, "Prospecting for Hash Functions") spreads the ids.
    An odd factor and a summand key it, and a last mixing follows.

    Args:
        bits: int64 ``[R]`` in ``[0, 2**62)``, as :func:`uniform_bits` gives them.
        ids: int64 ``[W]``, or ``[R, W]``.

    Returns:
        float32 ``[R, W]``, finite.
    """
    factor = (_word(bits >> _HALF) | 1).unsqueeze(1)
    summand = _word(bits).unsqueeze(1)
    # All in 32 bits, which wrap around: half the memory traffic of 64.
    hashed = _mix(_mix(ids.to(torch.int32) + 1) * factor + summand)
    # 31 bits, since float32 tells small numbers apart, not those next to 1: of 1 - u the small ones
    # decide which unlikely token wins.
    above = hashed.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return above.clamp_(max=_BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def _word(bits: Tensor) -> Tensor:
    """The lower 31 bits and a copy of one of them, as int32 of either sign."""
    low = bits & _HALF_MASK
    return (low | ((low & 1) << 31)).to(torch.int32)


def _mix(words: Tensor) -> Tensor:
    """Wellons' ``lowbias32`` of int32 words, whose shifts must bring in zeros; in place."""
    words ^= (words >> 16) & 0xFFFF
    words *= _MIX[0]
    words ^= (words >> 15) & 0x1FFFF
    words *= _MIX[1]
    words ^= (words >> 16) & 0xFFFF
    return words

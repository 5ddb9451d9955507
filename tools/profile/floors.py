"""What this machine can do at best, measured now: memory bandwidth and arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["MachineRates", "measure_rates"]

_STREAMED_BYTES = 256 << 20
_MATRIX = 1024
_TRIES = 7


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Of this machine with the threads that torch computes with.

    Attributes:
        bytes_per_s: reading memory once, far beyond the caches.
        flops_per_s: a product of two matrices.
    """

    bytes_per_s: float
    flops_per_s: float


def measure_rates(dtype: torch.dtype) -> MachineRates:
    """Measure both; the best of some tries. Takes about a second.

    Args:
        dtype: of the matrices.
    """
    memory = torch.ones(_STREAMED_BYTES // 4)
    left, right = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return MachineRates(
        bytes_per_s=_STREAMED_BYTES / _least(lambda: memory.max()),
        flops_per_s=2 * _MATRIX**3 / _least(lambda: left @ right),
    )


def _least(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)

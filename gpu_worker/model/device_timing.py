"""Times a computation on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

__all__ = ["least_seconds"]


def least_seconds(compute: Callable[[], Tensor], repeats: int) -> float:
    """The shortest time of several runs: other load on the machine can only make a run longer.

    Args:
        compute: queues the work and returns its result.
        repeats: number of runs.
    """
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        compute().cpu()  # waits for the device, if there is one to wait for
        seconds.append(time.perf_counter() - began)
    return min(seconds)

"""How long something takes on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

__all__ = ["least_seconds"]


def least_seconds(compute: Callable[[], Tensor], repeats: int) -> float:
    """The least of some tries: others on the machine can only make it longer.

    Args:
        compute: gives what must be there for it to be over.
        repeats: how often it is tried.
    """
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        compute().cpu()  # waits for the device, if there is one to wait for
        seconds.append(time.perf_counter() - began)
    return min(seconds)

"""How many threads torch computes with; the native library takes as many."""

from __future__ import annotations

import torch

from penstock.shared.local.cores import usable_cores

__all__ = ["set_compute_threads"]


def set_compute_threads(wanted: int | None) -> None:
    """Compute with ``wanted`` threads; None: torch's own choice, within the usable cores.

    Torch counts the cores of the machine, also those on which a container has no time.
    """
    if wanted is None:
        wanted = min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(wanted)

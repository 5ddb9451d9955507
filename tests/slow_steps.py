"""Engines on a slow device, so that a test can disturb a stream however fast its machine is."""

from __future__ import annotations

from pathlib import Path

from faults.rig import mutated

__all__ = ["slow_steps"]

_RUN = "        output = self._run(plan)\n"


def slow_steps(folder: Path, seconds: float) -> str:
    """A search path on which each step of a worker that starts there takes at least so long."""
    slow = f"        time.sleep({seconds})\n"
    return mutated(folder, "gpu_worker/engine_process/worker.py", _RUN, slow + _RUN)

"""The command ``penstock profile``."""

from __future__ import annotations

from ..measurement import measurement
from ..report import Progress, Report
from .options import ProfileOptions

__all__ = ["profile"]


@measurement(title="penstock {subject}", passed="the parts add up", failed="NOT accounted: {names}")
def profile(options: ProfileOptions, progress: Progress) -> Report:
    """Where the time of a worker's steps goes on this CPU, and what bounds them.

    Runs the engine process's loop in this process: no Redis, all requests at once.
    """
    from .step_profile import profile_steps

    return profile_steps(options, progress)

"""Keeps Python's cyclic garbage collector out of the step loop.

A step makes and drops a few objects for each sequence, none of them part of a cycle: reference
counts free them at once. The collector sees only that many objects were made and walks the live
ones again and again, the model's and every waiting request's among them, which costs up to a third
of the scheduler's time and comes in pauses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calm_collector"]

_THRESHOLDS = (50_000, 20, 20)
"""More new objects than a step of a thousand sequences makes before it frees them."""


@contextmanager
def calm_collector() -> Iterator[None]:
    """While the ``with`` lasts, what lives now is not looked at, and the rest seldom."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

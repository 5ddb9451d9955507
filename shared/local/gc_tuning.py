"""Keeps Python's cyclic garbage collector out of loops that must not pause, and out of imports.

A worker's step makes and drops a few objects for each sequence, a gateway does so for each request.
Nearly none is part of a cycle, so reference counts free them at once. The collector only sees that
many objects were made, and walks all live ones again and again, including the model's or the app's.
That costs up to a third of the scheduler's time, and a gateway's first tokens wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calm_collector", "without_collector"]

_THRESHOLDS = (50_000, 20, 20)
"""More new objects than a step of a thousand sequences makes before it frees them."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside the ``with``, collect nothing: for imports, which make objects that stay.

    The collector would walk them again and again, for a tenth of the time that the imports take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def calm_collector() -> Iterator[None]:
    """Inside the ``with``, never walk what lives now, and seldom walk the rest."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

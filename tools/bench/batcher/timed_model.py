"""A model whose batch takes a fixed time and a little for each item, as one on a device does."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["TARGET", "TimedModel"]

TARGET = f"{__name__}:TimedModel"


class TimedModel:
    """An item is ``[ms of a batch, ms of an item]``; its result is the size of its batch."""

    def infer(self, items: list[Any]) -> list[int]:
        """Take the time."""
        time.sleep((items[0][0] + sum(item[1] for item in items)) / 1000)
        return [len(items)] * len(items)

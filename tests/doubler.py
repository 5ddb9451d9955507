"""A batcher for tests: doubles numbers, and does on demand whatever may go wrong."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

_ERRORS = {
    "value": ValueError,
    "other": RuntimeError,
    "cancelled": asyncio.CancelledError,
}


class Doubler:
    """Doubles ``x``. A map may ask for more: see :meth:`infer`."""

    def load(self) -> None:
        self.calls = 0

    def cost(self, item: dict[str, Any]) -> Any:
        return item.get("cost", 1)

    def key(self, item: dict[str, Any]) -> Any:
        return item.get("key")

    def infer(self, items: list[dict[str, Any]]) -> list[Any]:
        self.calls += 1
        # Done for a batch as a whole, before anything is computed.
        for item in items:
            if "log" in item:  # which batches there were, seen from outside
                with Path(item["log"]).open("a") as file:
                    file.write(f"{len(items)} {item['x']}\n")
            if "wait_for" in item:
                while not Path(item["wait_for"]).exists():
                    time.sleep(0.01)
            if item.get("die"):
                os.kill(os.getpid(), signal.SIGSEGV)
            if item.get("exit"):
                raise SystemExit("replace me")
            if "raise" in item:
                raise _ERRORS[item["raise"]]("bad x")
        if any(item.get("few") for item in items):
            return []
        return [self._result(item, len(items)) for item in items]

    def _result(self, item: dict[str, Any], size: int) -> Any:
        if "return" in item:
            returned = {"error": KeyError("x"), "object": object(), "nan": [math.nan]}
            return returned[item["return"]]
        return {"y": 2 * item["x"], "batch": size}


class AsyncDoubler(Doubler):
    """The same, asynchronous."""

    async def load(self) -> None:  # type: ignore[override]
        self.lock = asyncio.Lock()
        await asyncio.sleep(0)
        super().load()

    async def infer(self, items: list[dict[str, Any]]) -> list[Any]:  # type: ignore[override]
        async with self.lock:
            await asyncio.sleep(0)
            return super().infer(items)


class Meeting:
    """Answers a batch when two others are there."""

    async def load(self) -> None:
        self.barrier = asyncio.Barrier(3)

    async def infer(self, items: list[Any]) -> list[Any]:
        await self.barrier.wait()
        return items


class Bytes:
    """Turns bytes round."""

    def infer(self, items: list[bytes]) -> list[bytes]:
        return [item[::-1] for item in items]


class Nothing:
    """No batcher."""

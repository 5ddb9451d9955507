"""One event loop for the life of the process, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import NamedTuple

__all__ = ["LoopThread"]

_PATIENCE_S = 2.0


class _Raised(NamedTuple):
    """What asyncio would end the whole loop for."""

    error: BaseException


class LoopThread:
    """Runs awaitables of any threads in one loop, which begins with the first of them.

    Clients of asyncio belong to the loop in which they began.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, awaitable: Awaitable[object]) -> object:
        """Wait for an awaitable, and return or raise what it does; from any thread but the loop's.

        Others may be waited for meanwhile.
        """
        result = asyncio.run_coroutine_threadsafe(_outcome(awaitable), self._begun()).result()
        if isinstance(result, _Raised):
            raise result.error
        return result

    def close(self) -> None:
        """End the loop, unless it hangs. Nothing may be waited for."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_PATIENCE_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _begun(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
                self._thread.start()
            return self._loop


async def _outcome(awaitable: Awaitable[object]) -> object:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        return _Raised(error)

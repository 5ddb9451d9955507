"""Records when workers swept, since the next sweep ends overdue requests."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time

from redis.exceptions import RedisError

from ..environment import Environment

__all__ = ["SweepWatch"]

_POLL_S = 0.05


class SweepWatch:
    """Records the times of sweeps, as the server stores them.

    Each living worker sweeps every third of a lease. While all workers are dead, or the machine is
    overloaded, sweeps pause, and only readers end overdue requests.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._since = time.monotonic()
        self._times: list[int] = []

    def next_after(self, due_ms: int) -> int | None:
        """The first sweep seen at or after a time, both in ms of Redis' clock; None: none so far.

        On a busy machine it polls less often and may return a later sweep.
        """
        at = bisect.bisect_left(self._times, due_ms)
        return self._times[at] if at < len(self._times) else None

    def note(self, swept_ms: int) -> None:
        """Record a sweep; times do not decrease."""
        self._times.append(swept_ms)

    @property
    def longest_pause_s(self) -> float:
        """The longest time without a sweep, up to now."""
        return max(self._longest_s, time.monotonic() - self._since)

    async def run(self, env: Environment) -> None:
        """Poll until cancelled."""
        last: bytes | None = None
        self._since = time.monotonic()
        while True:
            with contextlib.suppress(RedisError, OSError):
                swept = await env.direct.redis.hget(env.keys.sweep, "swept_at")  # type: ignore[misc]
                if swept != last:
                    if swept is not None:
                        self.note(int(swept))
                    last, now = swept, time.monotonic()
                    self._longest_s, self._since = max(self._longest_s, now - self._since), now
            await asyncio.sleep(_POLL_S)

"""When workers swept, since an end by deadline comes with the next sweep."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time

from redis.exceptions import RedisError

from ..environment import Environment

__all__ = ["SweepWatch"]

_LOOK_S = 0.05


class SweepWatch:
    """Looks when workers last swept, by the server's account.

    A sweep comes every third of a lease from each worker that lives. With every worker killed, or
    on a machine too small for all of them, none comes for longer, and nothing can expire meanwhile.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._since = time.monotonic()
        self._times: list[int] = []

    def next_after(self, due_ms: int) -> int | None:
        """The first sweep seen at or after a time, both in ms of Redis' clock; None: none so far.

        Looking too seldom, as on a busy machine, gives a later one than there was.
        """
        at = bisect.bisect_left(self._times, due_ms)
        return self._times[at] if at < len(self._times) else None

    def note(self, swept_ms: int) -> None:
        """A sweep was seen; times do not go back."""
        self._times.append(swept_ms)

    @property
    def longest_pause_s(self) -> float:
        """The longest time without a sweep, the present one counted."""
        return max(self._longest_s, time.monotonic() - self._since)

    async def run(self, env: Environment) -> None:
        """Look until cancelled."""
        last: bytes | None = None
        self._since = time.monotonic()
        while True:
            with contextlib.suppress(RedisError, OSError):
                swept = await env.direct.redis.hget(env.keys.floors, "swept")  # type: ignore[misc]
                if swept != last:
                    if swept is not None:
                        self.note(int(swept))
                    last, now = swept, time.monotonic()
                    self._longest_s, self._since = max(self._longest_s, now - self._since), now
            await asyncio.sleep(_LOOK_S)

"""Tokens that wait a moment, so that several steps cost the way to the readers once.

vLLM and SGLang have the same idea as ``--stream-interval``, counted in tokens. Here it is a time:
readers of a slow model wait no longer than those of a fast one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..engine.requests.engine_request import Update, joined_updates

__all__ = ["HeldUpdates"]


class HeldUpdates:
    """Updates of runs that publish at intervals. A run's first tokens and its end never wait.

    Args:
        interval_s: how long a token may wait, in seconds; 0: none waits.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._held: dict[str, list[Update]] = {}
        self._streaming: set[str] = set()  # runs with tokens published by this process
        self._released_at = float("-inf")

    def forget(self, run: str) -> None:
        """Drop what is held of a run that was aborted."""
        self._held.pop(run, None)
        self._streaming.discard(run)

    def is_due(self, now: float) -> bool:
        """Whether an interval has passed since all were released."""
        return now - self._released_at >= self._interval_s

    def release(self, updates: Sequence[Update], now: float, *, everything: bool) -> list[Update]:
        """What to publish after a step, the updates of a run in their order.

        Args:
            updates: what the step gave.
            now: monotonic seconds.
            everything: hold nothing back, though the interval has not passed.
        """
        urgent = {update.id: None for update in updates if self._is_urgent(update)}
        if everything or self.is_due(now):
            self._released_at = now
            if not self._held:
                return list(updates)
            self._hold(updates)
            held, self._held = self._held, {}
            return _joined(held.values())
        self._hold(updates)
        return _joined([self._held.pop(run) for run in urgent])

    def _is_urgent(self, update: Update) -> bool:
        run = update.id
        if update.finish is not None:
            self._streaming.discard(run)
            return True
        if run not in self._streaming:
            self._streaming.add(run)
            return True
        return False

    def _hold(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._held.setdefault(update.id, []).append(update)


def _joined(runs: Iterable[list[Update]]) -> list[Update]:
    """One update for each run; of a run whose updates cannot be joined, all of them.

    The edge will meet the same error when it joins them, and end that request alone.
    """
    found: list[Update] = []
    for updates in runs:
        try:
            found.append(joined_updates(updates))
        except Exception:
            found += updates
    return found

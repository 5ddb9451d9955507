"""The answers that are being sent: one timer for their keep-alives, and an early end for all."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..monitoring.gateway_metrics import GatewayMetrics

__all__ = ["OpenAnswer", "OpenAnswers"]

_TICKS = 8
"""Looks in the longest silence; a comment comes after six of them without an event."""


class OpenAnswer(Protocol):
    """An answer that is being sent."""

    def end_early(self) -> None:
        """Tell the client to come back elsewhere; the request goes on."""

    def tick(self, keep_alive_after: int) -> None:
        """A moment has passed; after so many of them without an event a comment is due."""


class OpenAnswers:
    """The open answers of a process.

    Args:
        metrics: shows what they do.
        keep_alive_s: longest silence of a stream.
    """

    def __init__(self, metrics: GatewayMetrics, keep_alive_s: float) -> None:
        self.metrics = metrics
        self._tick_s = keep_alive_s / _TICKS
        self._answers: set[OpenAnswer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False

    def add(self, answer: OpenAnswer) -> None:
        """An answer begins."""
        self._answers.add(answer)
        if self._timer is None:
            self._wait()
        if self._ending:
            answer.end_early()

    def remove(self, answer: OpenAnswer) -> None:
        """An answer has ended."""
        self._answers.discard(answer)

    def end_all(self) -> None:
        """End all of them, and those that still begin."""
        self._ending = True
        for answer in list(self._answers):
            answer.end_early()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for answer in list(self._answers):
            answer.tick(_TICKS - 2)
        if self._answers:
            self._wait()

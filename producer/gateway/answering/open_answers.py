"""The answers that are being sent, so that a gateway which ends can end them."""

from __future__ import annotations

from typing import Protocol

from ..gateway_metrics import GatewayMetrics

__all__ = ["Endable", "OpenAnswers"]


class Endable(Protocol):
    """An answer that can be ended early."""

    def end_early(self) -> None:
        """Tell the client to come back elsewhere; the request goes on."""


class OpenAnswers:
    """The open answers of a process.

    Args:
        metrics: shows what they do.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.metrics = metrics
        self._answers: set[Endable] = set()
        self._ending = False

    def add(self, answer: Endable) -> None:
        """An answer begins."""
        self._answers.add(answer)
        if self._ending:
            answer.end_early()

    def remove(self, answer: Endable) -> None:
        """An answer has ended."""
        self._answers.discard(answer)

    def end_all(self) -> None:
        """End all of them, and those that still begin."""
        self._ending = True
        for answer in list(self._answers):
            answer.end_early()

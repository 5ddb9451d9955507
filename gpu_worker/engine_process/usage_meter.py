"""What each run has used of the device: a step's time is shared out by the tokens it computes."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.output.step_output import StepOutput
from ..engine.plan import Plan
from ..engine.requests.engine_request import Update
from ..engine.sequence import SequenceStatus
from ..messages import RunUsage

__all__ = ["UsageMeter"]


class UsageMeter:
    """Counts device time and drafts by run, and tells them now and then.

    Args:
        every_s: how often the running ones are told, in seconds.
    """

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._told_at = float("-inf")
        self._device_s: dict[str, float] = {}
        self._drafted: dict[str, int] = {}

    def add(self, plan: Plan, output: StepOutput, seconds: float) -> None:
        """Share a step's time among its sequences, by query tokens and drafts."""
        share, device = seconds / plan.num_tokens, self._device_s
        for span in plan.spans:
            if span.sequence.status is SequenceStatus.FINISHED:
                continue  # it ended or was aborted while the step ran
            run, tokens = span.sequence.id, span.num_tokens + span.num_drafts
            device[run] = device.get(run, 0.0) + share * tokens
            if span.num_drafts:
                drafted = output.drafted.get(span.sequence, len(span.drafts))
                self._drafted[run] = self._drafted.get(run, 0) + drafted

    def forget(self, run: str) -> None:
        """A run was aborted."""
        self._device_s.pop(run, None)
        self._drafted.pop(run, None)

    def report(self, updates: Iterable[Update], now: float) -> tuple[RunUsage, ...]:
        """What runs have used so far: those that end now, and now and then all.

        Args:
            updates: what the step gave.
            now: monotonic seconds.
        """
        ended = [update.id for update in updates if update.finish is not None]
        if now - self._told_at >= self._every_s:
            self._told_at = now
            runs = list(self._device_s)
        else:
            runs = [run for run in ended if run in self._device_s]
        told = tuple(
            RunUsage(run, round(self._device_s[run] * 1e6), self._drafted.get(run, 0))
            for run in runs
        )
        for run in ended:
            self.forget(run)
        return told

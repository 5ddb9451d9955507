"""A log of steps: how much work was in each, and how long it took.

The simulator fits its step times to it (``penstock simulate --steps``).
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import IO

from penstock.shared.errors import ConfigurationError

from ..engine.scheduling.step_features import StepFeatures

__all__ = ["StepLog", "step_log"]

_log = logging.getLogger("penstock.worker")


class StepLog:
    """Appends one JSON object a line and step: ``seconds`` and the fields of :class:`StepFeatures`.

    Args:
        path: of the file; made if it is not there.

    Raises:
        ConfigurationError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Line by line: concurrent readers see whole steps, and a killed worker loses none.
            self._lines: IO[str] | None = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigurationError(f"worker.step_log {path} cannot be written: {error}") from None

    def write(self, work: StepFeatures, seconds: float) -> None:
        """Log a step. A full disk ends the log, not the worker."""
        if self._lines is None:
            return
        try:
            self._lines.write(json.dumps({"seconds": round(seconds, 7), **asdict(work)}) + "\n")
        except OSError as error:
            _log.error("no further step is logged in %s: %s", self._path, error)
            self.close()

    def close(self) -> None:
        """Log no further step."""
        lines, self._lines = self._lines, None
        if lines is not None:
            with contextlib.suppress(OSError):  # what was not written then is not written now
                lines.close()


def step_log(path: Path | None) -> StepLog | None:
    """The log at a path; None without one."""
    return None if path is None else StepLog(path)

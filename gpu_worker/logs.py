"""Structured logs: one line per event with its worker and request ids, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

__all__ = ["configure_logging"]

_FIELDS = ("worker", "request", "lane", "tenant", "reason", "tokens")


class _Formatter(logging.Formatter):
    def __init__(self, worker: str, *, as_json: bool) -> None:
        super().__init__()
        self._worker = worker
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        known = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        fields = {"worker": self._worker, **known}
        trace = self.formatException(record.exc_info) if record.exc_info else None
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        moment += f".{int(record.msecs):03d}Z"
        if self._as_json:
            event = {
                "time": moment,
                "level": record.levelname.lower(),
                "event": record.getMessage(),
            }
            if trace:
                event["trace"] = trace
            return json.dumps({**event, **fields}, ensure_ascii=False)
        pairs = " ".join(f"{name}={value}" for name, value in fields.items())
        line = f"{moment} {record.levelname.lower():<7} {record.getMessage()}  {pairs}"
        return f"{line}\n{trace}" if trace else line


def configure_logging(
    worker: str, *, level: str = "info", form: Literal["text", "json"] = "text"
) -> logging.Logger:
    """The ``penstock`` logger, writing to standard error.

    Args:
        worker: id put on every line.
        level: least severity that is written.
        form: one readable line per event, or one JSON object.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(worker, as_json=form == "json"))
    logger = logging.getLogger("penstock")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger

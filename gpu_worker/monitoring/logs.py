"""Structured logs: one line per event with its worker and request ids, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Literal

__all__ = ["configure_logging", "printable"]

_FIELDS = ("worker", "request", "lane", "tenant", "reason", "tokens")


_MOST_FRAMES = 12
_MOST_TRACE = 8000


def printable(text: str, limit: int = 1000) -> str:
    """Text from outside as one line that can be logged, packed and encoded.

    At most ``limit`` characters of it; control characters and lone surrogates are escaped.
    """
    cut = text if len(text) <= limit else text[:limit] + "..."
    if cut.isprintable():
        return cut
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )


class _Formatter(logging.Formatter):
    def __init__(self, worker: str, *, as_json: bool) -> None:
        super().__init__()
        self._worker = worker
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        known = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        fields = {"worker": self._worker, **known}
        trace = _bounded_trace(record.exc_info[1]) if record.exc_info else None
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
            text = json.dumps({**event, **fields}, ensure_ascii=False)
            return text.encode(errors="backslashreplace").decode()
        pairs = " ".join(f"{name}={value}" for name, value in fields.items())
        message = printable(record.getMessage(), _MOST_TRACE)
        line = f"{moment} {record.levelname.lower():<7} {message}  {pairs}"
        return f"{line}\n{trace}" if trace else line


def _bounded_trace(error: BaseException | None) -> str:
    """The innermost frames of a traceback. Each line is indented: none can pass for an event."""
    if error is None:
        return ""
    try:
        text = "".join(traceback.format_exception(error, limit=-_MOST_FRAMES))
    except Exception:  # what it holds cannot be shown, however its message is made
        text = type(error).__name__
    cut = text if len(text) <= _MOST_TRACE else "...\n" + text[-_MOST_TRACE:]
    return "\n".join(f"    {printable(line, _MOST_TRACE)}" for line in cut.splitlines())


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

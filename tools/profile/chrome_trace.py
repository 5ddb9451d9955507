"""Steps and their parts as a Chrome trace: JSON that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.shared.errors import ConfigurationError

__all__ = ["write_chrome_trace"]

_PROCESS = 1


def write_chrome_trace(path: Path, steps: Sequence[tuple[float, int, Mapping[str, float]]]) -> None:
    """Write a trace.

    Args:
        path: of the file.
        steps: begin in seconds, tokens, and seconds by part in the order in which parts follow.

    Raises:
        ConfigurationError: it cannot be written.
    """
    events: list[dict[str, object]] = []
    for number, (began, tokens, parts) in enumerate(steps):
        at = began
        total = sum(parts.values())
        events.append({**_event("step", at, total, 1), "args": {"step": number, "tokens": tokens}})
        for name, seconds in parts.items():
            events.append(_event(name, at, seconds, 1))
            at += seconds
    try:
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--trace {path} cannot be written: {error.strerror}") from None


def _event(name: str, began: float, seconds: float, thread: int) -> dict[str, object]:
    return {
        "name": name, "ph": "X", "pid": _PROCESS, "tid": thread,
        "ts": round(1e6 * began, 1), "dur": round(1e6 * seconds, 1),
    }  # fmt: skip

"""Renders chat templates in processes that may crash, or be ended at their limits."""

from __future__ import annotations

import json
import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from io import IOBase
from typing import Any

from .compile_sandbox import MEMORY_BYTES, CompileSandbox
from .render_loop import RENDER_CPU_S

__all__ = ["TemplateRefusal", "TemplateRenderer"]

_MOST_IDLE = 4
"""Processes kept for the next requests: as many as render side by side."""

_ANSWER_S = 60.0
_MAX_ANSWER_BYTES = 64 << 20


class TemplateRefusal(Exception):
    """A template did not render a conversation; the message says why."""


class TemplateRenderer:
    """Renders chat templates. Thread-safe.

    Each process renders one template for one caller at a time. A rendering that crashes, or passes
    its limit of CPU time or memory, ends only its own process.

    Args:
        sandbox: forks the processes.
    """

    def __init__(self, sandbox: CompileSandbox) -> None:
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._idle: list[_RenderProcess] = []

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Args:
            source: of the template.
            variables: of the template, which have a form in JSON.

        Raises:
            TemplateRefusal: the template is malformed, refuses them, or passed a limit.
            RuntimeError: no process can be started.
        """
        while True:
            process = self._take(source)
            try:
                text = process.render(variables)
            except TemplateRefusal:
                self._give_back(process)
                raise
            if text is not None:
                self._give_back(process)
                return text
            if process.is_new:
                raise RuntimeError("the compile server does not run; its error is in the log")
            process.close()  # it had ended before, together with its server

    def _take(self, source: str) -> _RenderProcess:
        with self._lock:
            for at, process in enumerate(self._idle):
                if process.source == source:
                    return self._idle.pop(at)
        process = _RenderProcess(self._sandbox.open_renderer(), source)
        process.compile()
        return process

    def _give_back(self, process: _RenderProcess) -> None:
        if not process.is_usable:
            process.close()
            return
        with self._lock:
            self._idle.append(process)
            surplus = self._idle.pop(0) if len(self._idle) > _MOST_IDLE else None
        if surplus is not None:
            surplus.close()


class _RenderProcess:
    """The connection to one process.

    Attributes:
        source: of its template.
        is_new: it has not rendered anything.
        is_usable: it can render once more.
    """

    def __init__(self, connection: socket.socket, source: str) -> None:
        self.source = source
        self.is_new = True
        self.is_usable = True
        connection.settimeout(_ANSWER_S)
        self._lines = connection.makefile("rwb")
        self._end = weakref.finalize(self, _close, self._lines, connection)

    def compile(self) -> None:
        """Hand over the template.

        Raises:
            TemplateRefusal: it is malformed, or compiling it passed a limit.
            RuntimeError: the process has not begun.
        """
        try:
            if self._ask(self.source) is None:
                raise RuntimeError("the compile server does not run; its error is in the log")
        except BaseException:
            self.close()
            raise

    def render(self, variables: Mapping[str, Any]) -> str | None:
        """The text; None if the process had ended before.

        Raises:
            TemplateRefusal: see :meth:`TemplateRenderer.render`.
        """
        answer = self._ask(dict(variables))
        if answer is None:
            return None
        self.is_new = False
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """The process reads the end of file and ends."""
        self.is_usable = False
        self._end()

    def _ask(self, order: object) -> dict[str, Any] | None:
        """The answer; None if the process did not read the order."""
        line = json.dumps(order).encode() + b"\n"
        has_begun = False
        answer = b""
        try:
            self._lines.write(line)
            self._lines.flush()
            has_begun = self._lines.readline(1) == b"\n"
            answer = self._lines.readline(_MAX_ANSWER_BYTES)
        except OSError:
            self.is_usable = False
        if not has_begun:
            self.is_usable = False
            return None
        if not answer.endswith(b"\n"):
            self.is_usable = False
            raise TemplateRefusal(
                f"rendering these took more than {RENDER_CPU_S:g} s of computing or "
                f"{MEMORY_BYTES >> 20} MiB of memory, or crashed"
            )
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise TemplateRefusal(found["error"])
        return found


def _close(lines: IOBase, connection: socket.socket) -> None:
    with connection, suppress(OSError):  # what was not sent has no reader any more
        lines.close()

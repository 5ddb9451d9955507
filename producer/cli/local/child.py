"""A program that runs beside a command and ends with it, whatever ends the command."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound

__all__ = ["Child", "stop_all"]

_STOP_S = 15.0
"""Longer than a worker's drain by default."""

_POLL_S = 0.02
_LAST_WORDS_S = 1.0


class Child:
    """A child process for the time of a ``with`` block.

    It runs in a session of its own: Ctrl-C reaches the command alone, which then ends its children
    in its own order.

    Args:
        name: what it is, for messages, such as ``worker``.
        command: program and arguments.
        environment: of the process.
        on_line: called in a thread with each line that the program writes; None keeps the last.
        ready_file: add ``--ready-file PATH``, for :meth:`wait_until_ready`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        *,
        ready_file: bool = True,
    ) -> None:
        self.name = name
        self._has_ready_file = ready_file
        self._command = command
        self._environment = dict(environment)
        self._on_line = on_line
        self._last: collections.deque[str] = collections.deque(maxlen=1)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
            self._ready = Path(folder) / "ready.json"
            flags = ["--ready-file", str(self._ready)] if self._has_ready_file else []
            self._process = spawn_bound(
                [*self._command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                new_session=True,
            )
            # Lines are read as they come: a program whose pipe is full would stand still.
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    async def wait_until_ready(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the program has written its ready file; what it holds.

        Raises:
            PenstockError: the program ended instead, or takes longer than ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                facts: dict[str, Any] = json.loads(self._ready.read_text())
                return facts
            self.check()
            await asyncio.sleep(_POLL_S)
        raise PenstockError(
            f"the {self.name} is not ready after {timeout_s:g} s; it last said: {self.last_line}"
        )

    async def wait_until_gone(self) -> None:
        """Wait for the program's end, which is always too early.

        Raises:
            PenstockError: it ended.
        """
        while True:
            self.check()
            await asyncio.sleep(_POLL_S)

    def check(self) -> None:
        """Raise if the program has ended.

        Raises:
            PenstockError: it has; the message has its exit code and its last line.
        """
        code = self._process.poll()
        if code is not None:
            self._reader.join(_LAST_WORDS_S)
            last = self.last_line.removeprefix("error: ")
            raise PenstockError(f"the {self.name} ended with exit code {code}: {last}")

    @property
    def last_line(self) -> str:
        """The last line that the program wrote."""
        return self._last[0] if self._last else "(it said nothing)"

    def kill(self) -> None:
        """End the program now. Repeating it is harmless."""
        self._process.kill()

    def terminate(self) -> None:
        """Ask the program to end, without waiting for it. Repeating it is harmless."""
        self._process.terminate()

    def wait(self, timeout_s: float = _STOP_S) -> None:
        """Wait for the program's end after :meth:`terminate`; kill it if that takes too long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_LAST_WORDS_S)

    def _stop(self) -> None:
        self.terminate()
        self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for data in pipe:
                line = data.decode(errors="replace").rstrip()
                if line:
                    self._last.append(line)
                    if self._on_line is not None:
                        self._on_line(line)


def stop_all(children: Sequence[Child]) -> None:
    """End several programs side by side."""
    for child in children:
        child.terminate()
    for child in children:
        child.wait()

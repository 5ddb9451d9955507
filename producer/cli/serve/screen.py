"""What ``penstock serve`` shows: progress while models load, how to ask, and what children log."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from penstock.shared.protocol.states import ModelKind

from ..output import printable

__all__ = ["Screen"]

_QUESTIONS: Mapping[ModelKind, tuple[str, Mapping[str, object], str]] = {
    ModelKind.GENERATE: (
        "chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}]},
        "penstock submit Hello",
    ),
    ModelKind.EMBED: ("embeddings", {"input": "Hello"}, "penstock embed Hello"),
    ModelKind.RERANK: ("rerank", {"query": "A greeting?", "documents": ["Hello", "No"]}, ""),
    ModelKind.CLASSIFY: ("classify", {"input": "Hello"}, ""),
}
"""For a kind of model: endpoint, body and command of a first request."""

_GRAVE = ("warning", "error", "critical", "Traceback")


class Screen:
    """Standard error: notes, and the lines of the programs that run beside the command."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._last = ""
        self._loading = False

    def note(self, text: str) -> None:
        """Tell of progress."""
        self._console.print(printable(text), markup=False)

    def line(self, text: str) -> None:
        """A line of a child; called in threads.

        While models load on a terminal the latest one stands beside the spinner, and only warnings
        and errors stay on the screen.
        """
        self._last = printable(text)
        grave = any(word in text for word in _GRAVE)
        if grave or not (self._loading and self._console.is_terminal):
            self._console.print(self._last, markup=False, style="dim")

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """The time in which models load."""
        if not self._console.is_terminal:
            self.note(f"loading {what} ...")
            yield
            return
        began, self._loading = time.monotonic(), True
        spinner = Spinner("dots", "")

        def show() -> Spinner:
            words = f"loading {what}, {time.monotonic() - began:.1f} s  {self._last}"
            spinner.update(text=words[: self._console.width - 4])
            return spinner

        try:
            with Live(get_renderable=show, console=self._console, transient=True):
                yield
        finally:
            self._loading = False

    def ready(
        self,
        base_url: str,
        model: str,
        kind: ModelKind,
        redis_url: str,
        workers: int,
        seconds: float,
        needs_key: bool,
    ) -> None:
        """Say what to do now."""
        path, fields, command = _QUESTIONS.get(kind, _QUESTIONS[ModelKind.GENERATE])
        body = json.dumps({"model": model, **fields})
        count = "1 worker" if workers == 1 else f"{workers} workers"
        lines = [
            f"{model} is served by {count}, ready after {seconds:.1f} s. Ask it:",
            "",
            f"  curl {base_url}/{path} -H 'content-type: application/json' \\",
            *(["    -H 'authorization: Bearer YOUR_API_KEY' \\"] if needs_key else []),
            f"    -d '{body}'",
            f"  export REDIS_URL={redis_url}" + (command and f"; {command} --model {model}"),
            "",
            "Ctrl-C ends it; what is not done by then goes on at the next start.",
        ]
        self.note("\n".join(lines))
        sys.stderr.flush()

"""Output of commands: text for people, JSON for scripts, no control characters on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, TextIO

from penstock.shared.protocol.events import Chunk, End, TokenLogprobs, Usage

from ..choices import Choice
from ..results import Result, Submitted

__all__ = [
    "ChoiceWriter",
    "TextWriter",
    "chunk_facts",
    "drop_output",
    "end_facts",
    "make_encodable",
    "one_line",
    "open_missing",
    "printable",
    "result_facts",
    "submitted_facts",
    "summary",
    "waiting",
    "write_choices",
    "write_json",
    "write_note",
]

# A model's text may hold anything, escape sequences included: show control characters as the
# pictures Unicode has for them.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Text that moves no cursor and sets no colour."""
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """The same on one line, as error messages are."""
    return printable(" ".join(text.split()))


def make_encodable(*streams: TextIO) -> None:
    """Let a terminal without UTF-8 show question marks, rather than end a command."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def open_missing() -> None:
    """Put the null device where a standard stream was closed before the start (``>&-``).

    Otherwise the next file or connection would get its number, and be what children write to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def drop_output() -> None:
    """Discard what could not be written to standard output, so that exit does not try again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def write_json(facts: dict[str, Any]) -> None:
    """One object on one line of standard output, at once."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def write_note(text: str) -> None:
    """A line for a person, on standard error, so that output in a pipe stays output."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if sys.stderr.isatty():
        text = f"\x1b[2m{text}\x1b[0m"
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class TextWriter:
    """Writes a stream's text to standard output as it comes.

    In a pipe the text passes unchanged; a terminal gets it without control characters. A line
    that the text leaves open is ended by :meth:`close`.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False

    def write(self, text: str) -> None:
        """Write a piece of text."""
        if text:
            self._open = not text.endswith("\n")
            sys.stdout.write(printable(text) if self._terminal else text)
            sys.stdout.flush()

    def close(self) -> None:
        """End the last line."""
        if self._open:
            self._open = False
            sys.stdout.write("\n")
            sys.stdout.flush()


class ChoiceWriter:
    """Writes a stream of one choice as it comes, and one of several so that they stay apart.

    It writes the choices one after the other, each under a line of its own. A choice's text waits
    until those before it have ended.
    """

    def __init__(self) -> None:
        self._out = TextWriter()
        self._waiting: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        self._now: int | None = None

    def write(self, chunk: Chunk) -> None:
        """Write what can be written now."""
        if not chunk.parts:
            self._out.write(chunk.text)
            return
        for part in chunk.parts:
            self._waiting.setdefault(part.choice, []).append(part.text)
            if part.reason is not None:
                self._ended.add(part.choice)
        while (index := self._next()) is not None:
            self._show(index)

    def close(self) -> None:
        """Write the rest and end the last line."""
        for index in sorted(self._waiting):
            self._show(index)
        self._out.close()

    def _next(self) -> int | None:
        """Return the choice to write next, None if it has nothing to write."""
        index = 0 if self._now is None else self._now
        if index not in self._waiting and index in self._ended:
            index += 1
        return index if index in self._waiting else None

    def _show(self, index: int) -> None:
        if index != self._now:
            self._out.close()
            self._out.write(_headline(index))
            self._now = index
        for text in self._waiting.pop(index):
            self._out.write(text)


def write_choices(choices: Sequence[Choice]) -> None:
    """Write whole outputs; several as :class:`ChoiceWriter` does."""
    for choice in choices:
        writer = TextWriter()
        if len(choices) > 1:
            writer.write(_headline(choice.index))
        writer.write(choice.text)
        writer.close()


def _headline(index: int) -> str:
    return f"--- choice {index} ---\n"


def waiting(text: str) -> AbstractContextManager[Any]:
    """Show a spinner on a terminal; show nothing in a pipe."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def submitted_facts(submitted: Submitted) -> dict[str, Any]:
    """The JSON form."""
    return asdict(submitted)


def chunk_facts(request_id: str, chunk: Chunk) -> dict[str, Any]:
    """The JSON form."""
    return {
        "event": "chunk",
        "id": request_id,
        "start": chunk.start,
        "token_ids": list(chunk.token_ids),
        "text": chunk.text,
        **_logprobs(chunk.logprobs),
        **({"parts": [part._asdict() for part in chunk.parts]} if chunk.parts else {}),
        **_prompt_logprobs(chunk.prompt_logprobs),
    }


def end_facts(request_id: str, end: End) -> dict[str, Any]:
    """The JSON form."""
    return {"event": "end", "id": request_id, **_end(end)}


def result_facts(result: Result) -> dict[str, Any]:
    """The JSON form."""
    return {
        "id": result.id,
        "text": result.text,
        "token_ids": list(result.token_ids),
        **_logprobs(result.logprobs),
        **_choices(result.choices),
        **_prompt_logprobs(result.prompt_logprobs),
        **_end(result.end),
    }


def _choices(choices: Sequence[Choice]) -> dict[str, Any]:
    if len(choices) == 1:
        return {}
    facts = [
        {
            "index": choice.index,
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "reason": choice.reason,
            **_logprobs(choice.logprobs),
        }
        for choice in choices
    ]
    return {"choices": facts}


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    if not logprobs:
        return {}
    return {"logprobs": [{"logprob": of.logprob, "top": of.top} for of in logprobs]}


def _prompt_logprobs(logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
    facts = [None if of is None else {"logprob": of.logprob, "top": of.top} for of in logprobs]
    return {"prompt_logprobs": facts} if facts else {}


def _end(end: End) -> dict[str, Any]:
    return {
        "n": end.n,
        "state": end.state.value,
        "reason": end.reason.value,
        "message": end.message,
        "usage": None if end.usage is None else asdict(end.usage),
    }


def summary(end: End) -> str:
    """Return a line about a completed request, for a person."""
    usage = end.usage or Usage(output_tokens=end.n)
    parts = [
        f"{end.state} ({end.reason})",
        f"{usage.prompt_tokens} prompt + {usage.output_tokens} output tokens",
    ]
    if usage.queue_ms is not None:
        parts.append(f"queue {usage.queue_ms} ms")
    if usage.ttft_ms is not None:
        parts.append(f"first token {usage.ttft_ms} ms")
    return ", ".join(parts)

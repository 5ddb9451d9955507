"""Takes an answer apart while it is generated, by transformers' own parser.

A checkpoint's ``response_template`` says which marks surround its reasoning and its tool calls.
transformers' ``ResponseParser`` follows them; here its events become deltas. What it cannot parse
is content, so that no word is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.shared.protocol.chat.deltas import CONTENT, REASONING, TOOL_CALL, Delta

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

__all__ = ["REASONING_FIELDS", "ResponseDeltas"]

REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
_CALLS_FIELD = "tool_calls"

_MOST_AT_ONCE = 16
"""Characters outside of calls that are parsed at once; more are parsed one by one. A region that
opens and closes within them, and cannot be parsed, then takes nothing else with it."""

_MOST_HELD = 1024
"""Characters that the parser may hold back. Patterns that begin with any amount of white space take
quadratic time."""

_MOST_CALL = 1 << 18
"""Characters of a call."""


class ResponseDeltas:
    """The deltas of one output: an ``AnswerParser`` of the engine.

    Args:
        new_parser: makes a parser that stands where the output begins, or, with ``resume``, in the
            midst of it, outside of all regions.
        streamed: fields whose text is given as it comes, and whether white space around it is left
            out.
        calls: whether tool calls are reported; else they are content.
        special_texts: see the protocol.
    """

    def __init__(
        self,
        new_parser: Callable[..., ResponseParser],
        streamed: Mapping[str, bool],
        *,
        calls: bool,
        special_texts: Mapping[int, str],
    ) -> None:
        self.special_texts = special_texts
        self._new_parser = new_parser
        self._streamed = streamed
        self._reports_calls = calls
        self._num_calls = 0
        self._parser = new_parser()
        self._field: str | None = None  # of the open region
        self._body = ""  # of an open call
        self._held = ""  # fed since the last event
        self._space = ""  # at the end of a region's text, perhaps to be left out
        self._has_text = False  # whether the open region has had more than white space
        self._gave_up = False
        for event in self._parser.initial_events:
            self._read(event)

    def feed(self, text: str) -> list[Delta]:
        """See the protocol."""
        if self._gave_up:
            return _content(text)
        if self._field == _CALLS_FIELD or len(text) > _MOST_AT_ONCE:
            return [delta for character in text for delta in self._feed(character)]
        return self._feed(text)

    def finish(self) -> list[Delta]:
        """See the protocol."""
        if self._gave_up:
            return []
        try:
            _, events = self._parser.finalize()
        except Exception:
            return _content(self._body + self._held)
        return [delta for event in events for delta in self._read(event)]

    def _feed(self, text: str) -> list[Delta]:
        if self._gave_up:
            return _content(text)
        self._held += text
        try:
            events = self._parser.feed(text)
        except Exception:  # a call that is no JSON, say
            return self._fall_back()
        if events:
            self._held = ""
        deltas = [delta for event in events for delta in self._read(event)]
        if len(self._held) > _MOST_HELD or len(self._body) > _MOST_CALL:
            deltas += _content(self._body + self._held)
            self._gave_up = True
        return deltas

    def _fall_back(self) -> list[Delta]:
        """A region could not be parsed: its text is content, and parsing goes on behind it."""
        lost = self._body + self._held
        self._parser = self._new_parser(resume=True)
        self._field, self._body, self._held, self._space = None, "", "", ""
        return _content(lost)

    def _read(self, event: Mapping[str, Any]) -> list[Delta]:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._field, self._body, self._space, self._has_text = field, "", "", False
            return []
        if field in self._streamed:
            return self._text(field, event["text"]) if kind == "region_chunk" else self._close()
        if kind == "region_chunk":
            self._body += event["text"]
            return []
        body = self._body
        self._close()
        calls = _calls(event["value"]) if self._reports_calls and field == _CALLS_FIELD else None
        if calls is None:
            return [Delta(_kind(field), body)] if body else []
        deltas = []
        for name, arguments in calls:
            deltas.append(Delta(TOOL_CALL, arguments, self._num_calls, name))
            self._num_calls += 1
        return deltas

    def _close(self) -> list[Delta]:
        self._field, self._body, self._space = None, "", ""
        return []

    def _text(self, field: str, text: str) -> list[Delta]:
        """Text of a region as it comes; white space around the whole is left out where asked."""
        if self._streamed[field]:
            text = self._space + text
            if not self._has_text:
                text = text.lstrip()
            stripped = text.rstrip()
            self._space = text[len(stripped) :]
            text = stripped
        if not text:
            return []
        self._has_text = True
        return [Delta(_kind(field), text)]


def _kind(field: str) -> str:
    return REASONING if field in REASONING_FIELDS else CONTENT


def _content(text: str) -> list[Delta]:
    return [Delta(CONTENT, text)] if text else []


def _calls(value: object) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in what a region was parsed to; None if there is none."""
    found = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            return None
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        found.append((name, arguments))
    return found or None

"""The items of a response's output, as a pure function of its deltas.

Reasoning, a message and each call of a function are an item. An item begins with the first delta
of its kind and ends where another begins, or with the output. Streams show its events; the whole
response lists what has become of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.shared.protocol.chat.deltas import (
    CONTENT,
    REASONING,
    TOOL_CALL,
    Delta,
    ReasoningCount,
)
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason, State

from ..openai.chat_deltas import call_id

__all__ = ["ItemEvent", "OutputItems", "text_part"]

ItemEvent = tuple[str, dict[str, Any]]
"""An event's type without ``response.``, and its fields without ``sequence_number``."""

_PREFIXES = {CONTENT: "msg", REASONING: "rs", TOOL_CALL: "fc"}
_TEXT_EVENTS = {CONTENT: "output_text", REASONING: "reasoning_text"}


class OutputItems:
    """Gathers the items of one response.

    Args:
        response_id: the response's id; ids of items and calls are functions of it.
    """

    def __init__(self, response_id: str) -> None:
        self._id = response_id
        self._items: list[_Item] = []
        self._reasoning = ReasoningCount()

    @classmethod
    def of(cls, response_id: str, deltas: Iterable[Delta], end: End) -> OutputItems:
        """The items of a whole output."""
        items = cls(response_id)
        for delta in deltas:
            items.add(delta)
        items.close(end)
        return items

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens have brought reasoning."""
        return self._reasoning.tokens

    @property
    def open_text(self) -> str | None:
        """The id of the message that is open, if one is."""
        item = self._items[-1] if self._items else None
        return item.id if item is not None and item.kind == CONTENT else None

    @property
    def place(self) -> int:
        """Number of the last item."""
        return len(self._items) - 1

    def add(self, delta: Delta, start: int = 0) -> list[ItemEvent]:
        """Take a delta, whose token is counted from the token ``start`` on; its events."""
        events: list[ItemEvent] = []
        self._reasoning.add((delta,), start)
        last = self._items[-1] if self._items else None
        if last is None or (last.kind, last.call) != (delta.kind, delta.index):
            events = self._close_last() + self._open(delta)
        if delta.text:
            events.append(self._items[-1].add(delta.text))
        return events

    def close(self, end: End) -> list[ItemEvent]:
        """The output has ended; its events. An output that was completed has at least one item.

        The last item stays as it is if the output did not end by itself.
        """
        if end.state is not State.COMPLETED:
            return []
        events = [] if self._items else self._open(Delta(CONTENT, ""))
        reached_end = end.reason is Reason.STOP
        return events + self._close_last("completed" if reached_end else "incomplete")

    def objects(self) -> list[dict[str, Any]]:
        """All items as they are now."""
        return [item.object() for item in self._items]

    def _open(self, delta: Delta) -> list[ItemEvent]:
        number = len(self._items)
        name = f"{_PREFIXES[delta.kind]}_{self._id.removeprefix('resp_')}_{number}"
        call = call_id(self._id, 0, delta.index) if delta.kind == TOOL_CALL else ""
        item = _Item(name, number, delta, call)
        self._items.append(item)
        return item.begin()

    def _close_last(self, status: str = "completed") -> list[ItemEvent]:
        return self._items[-1].end(status) if self._items else []


class _Item:
    """One item: its texts so far."""

    def __init__(self, name: str, number: int, delta: Delta, call_id: str) -> None:
        self.id = name
        self.kind = delta.kind
        self.call = delta.index
        self._number = number
        self._function = delta.name
        self._call_id = call_id
        self._texts: list[str] = []
        self._status = "incomplete"

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> ItemEvent:
        self._texts.append(text)
        if self.kind == TOOL_CALL:
            return "function_call_arguments.delta", {**self._place(), "delta": text}
        more: dict[str, Any] = {"logprobs": []} if self.kind == CONTENT else {}
        return f"{_TEXT_EVENTS[self.kind]}.delta", {**self._part_place(), **more, "delta": text}

    def begin(self) -> list[ItemEvent]:
        item = {**self.object(), "status": "in_progress"}
        if self.kind != TOOL_CALL:
            item["content"] = []
        events: list[ItemEvent] = [
            ("output_item.added", {"output_index": self._number, "item": item})
        ]
        if self.kind != TOOL_CALL:
            part = {**self._part_place(), "part": self._part()}
            events.append(("content_part.added", part))
        return events

    def end(self, status: str) -> list[ItemEvent]:
        self._status = status
        whole = {"output_index": self._number, "item": self.object()}
        last: ItemEvent = ("output_item.done", whole)
        if self.kind == TOOL_CALL:
            done = {**self._place(), "name": self._function, "arguments": self._text}
            return [("function_call_arguments.done", done), last]
        more: dict[str, Any] = {"logprobs": []} if self.kind == CONTENT else {}
        text = {**self._part_place(), **more, "text": self._text}
        part = {**self._part_place(), "part": self._part()}
        return [(f"{_TEXT_EVENTS[self.kind]}.done", text), ("content_part.done", part), last]

    def object(self) -> dict[str, Any]:
        parts, status = [self._part()], self._status
        if self.kind == TOOL_CALL:
            return {
                "id": self.id,
                "type": "function_call",
                "status": status,
                "call_id": self._call_id,
                "name": self._function,
                "arguments": self._text,
            }
        if self.kind == REASONING:
            return {
                "id": self.id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": parts,
            }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def _part(self) -> dict[str, Any]:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self._text}
        return text_part(self._text)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._number}

    def _part_place(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


def text_part(text: str) -> dict[str, Any]:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

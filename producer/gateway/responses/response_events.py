"""The events of a response, as a pure function of its note and its token log.

Events are counted from 0 in the order in which the tokens bring them: what begins and ends with a
token, and its text. So streams that are live, replayed or read from a compacted log agree event for
event, and ``starting_after`` means the same for all. The ``id`` of an event is the next number,
where a reader goes on that has seen it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.shared.protocol.chat.deltas import CONTENT
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import Reason, State

from ..answering.sse import quoted
from ..api_errors import ApiError, invalid
from .output_items import ItemEvent, OutputItems
from .response_object import ResponseHead, refusal_of, response_object

__all__ = ["ResponseWriter"]


class ResponseWriter:
    """Writes the events of one response; the stream must be read from its first token on.

    Args:
        head: what never changes of the response.
        after: the last sequence number that the client has; -1 for none.
        refuses: the client has just asked for the response: one that is refused before its first
            token is an error to it, and no response.
    """

    def __init__(self, head: ResponseHead, after: int = -1, *, refuses: bool = False) -> None:
        self._head = head
        self._after = after
        self._refuses = refuses
        self._number = 0  # of the next event
        self._is_running = False  # as far as events say
        self._items = OutputItems(head.id)
        self._text_item: str | None = None
        self._text_event = ""

    @property
    def position(self) -> int:
        """See :class:`..answering.answers.EventWriter`."""
        return max(self._number, self._after + 1)

    def opening(self) -> bytes:
        """The events of a response that was accepted: they need no token, and come once."""
        return self._open().encode()

    def chunk(self, chunk: Chunk) -> bytes:
        """The first events before the first token, and those of each token."""
        events = [self._begin()]
        for delta in chunk.deltas:
            found = self._items.add(delta, chunk.start)
            if len(found) == 1 and delta.kind == CONTENT:  # what nearly every token brings
                events.append(self._text(delta.text))
            else:
                events.append(self._events(found))
        return "".join(events).encode()

    def end(self, end: End) -> bytes:
        """The events behind the last token; a failed response is one, too.

        Raises:
            ApiError: the request was refused, and the client is to hear that as an error; or the
                response has fewer events than its reader knows.
        """
        refusal = refusal_of(end) if self._refuses else None
        if refusal is not None:
            raise refusal
        events = [self._begin(), self._events(self._items.close(end))]
        kind = "completed" if end.state is State.COMPLETED else "failed"
        if end.reason is Reason.LENGTH:
            kind = "incomplete"
        items = self._items
        whole = response_object(self._head, end.state, end, items.objects(), items.reasoning_tokens)
        events.append(self._events([(kind, {"response": whole})]))
        if self._after >= self._number:
            allowed = f"0 to {self._number - 1}, the last event of {self._head.id!r}"
            message = f"starting_after: got {self._after}; allowed: {allowed}"
            raise invalid("starting_after", message)
        return "".join(events).encode()

    def error(self, error: ApiError) -> bytes:
        """The event of a stream that breaks although its response goes on.

        It has the number of the event before it, so that ``starting_after`` misses none.
        """
        opened = self._open()
        body = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": self.position - 1,
        }
        return f"{opened}event: error\ndata: {_json(body)}\n\n".encode()

    def _open(self) -> str:
        if self._number:
            return ""
        kinds = ("created", "queued") if self._head.background else ("created",)
        queued = response_object(self._head, State.QUEUED)
        return self._events([(kind, {"response": queued}) for kind in kinds])

    def _begin(self) -> str:
        if self._is_running:
            return ""
        self._is_running = True
        running = response_object(self._head, State.RUNNING)
        return self._open() + self._events([("in_progress", {"response": running})])

    def _events(self, events: Iterable[ItemEvent]) -> str:
        shown = []
        for kind, fields in events:
            number, name = self._number, f"response.{kind}"
            self._number += 1
            if number > self._after:
                data = _json({"type": name, **fields, "sequence_number": number})
                shown.append(f"event: {name}\nid: {number + 1}\ndata: {data}\n\n")
        return "".join(shown)

    def _text(self, text: str) -> str:
        """The event of a piece of the message that is open, made from prepared pieces."""
        number = self._number
        self._number += 1
        if number <= self._after:
            return ""
        if self._text_item != self._items.open_text:
            self._text_item = self._items.open_text
            place = {"item_id": self._text_item, "output_index": self._items.place}
            fields = {"type": "response.output_text.delta", **place, "content_index": 0}
            self._text_event = _json({**fields, "logprobs": []})[:-1]
        return (
            f"event: response.output_text.delta\nid: {number + 1}\ndata: {self._text_event}"
            f',"delta":{quoted(text)},"sequence_number":{number}}}\n\n'
        )


def _json(value: dict[str, Any]) -> str:
    """JSON without line ends of any kind."""
    return json.dumps(value, separators=(",", ":"))

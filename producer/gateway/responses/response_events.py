"""The events of a response, as a pure function of its note and its token log.

A fixed prologue has the sequence numbers 0 to 3. The event of token *i* has number 4 + *i*; a token
that shows no text has none. Four events follow the last token. So streams that are live, replayed
or read from a compacted log agree event for event, and ``starting_after`` means the same for all.
The ``id`` of an event is the next number, where a reader goes on that has seen it.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.shared.protocol import Chunk, End, Reason, State

from ..answering.sse import quoted
from ..api_errors import ApiError
from .response_object import ResponseHead, message_item, response_object, text_part

__all__ = ["ResponseWriter"]

_PROLOGUE = 4


class ResponseWriter:
    """Writes the events of one response; the stream must be read from its first token on.

    Args:
        head: what never changes of the response.
        after: the last sequence number that the client has; -1 for none.
    """

    def __init__(self, head: ResponseHead, after: int = -1) -> None:
        self._head = head
        self._after = after
        self._began = False
        self._texts: list[str] = []
        self._item = f"msg_{head.id.removeprefix('resp_')}"
        place = {"item_id": self._item, "output_index": 0, "content_index": 0, "logprobs": []}
        self._delta = json.dumps(
            {"type": "response.output_text.delta", **place}, separators=(",", ":")
        )[:-1]

    def chunk(self, chunk: Chunk) -> bytes:
        """The prologue before the first token, and one event for each token with text."""
        events = [self._begin()]
        for index, text in _token_texts(chunk):
            self._texts.append(text)
            number = _PROLOGUE + index
            if text and number > self._after:
                events.append(
                    f"event: response.output_text.delta\nid: {number + 1}\ndata: {self._delta}"
                    f',"delta":{quoted(text)},"sequence_number":{number}}}\n\n'
                )
        return "".join(events).encode()

    def end(self, end: End) -> bytes:
        """The events behind the last token; never an error: a failed response is one, too."""
        text = "".join(self._texts)
        number = _PROLOGUE + end.n
        response = response_object(self._head, end.state, end, text)
        events = [self._begin()]
        if end.state is State.COMPLETED:
            item = message_item(self._head.id, text, response["output"][0]["status"])
            place = {"item_id": self._item, "output_index": 0, "content_index": 0}
            done = {**place, "text": text, "logprobs": []}
            events.append(self._event(number, "output_text.done", done))
            part = {**place, "part": text_part(text)}
            events.append(self._event(number + 1, "content_part.done", part))
            whole = {"output_index": 0, "item": item}
            events.append(self._event(number + 2, "output_item.done", whole))
        kind = "failed" if end.state is not State.COMPLETED else "completed"
        if end.reason is Reason.LENGTH:
            kind = "incomplete"
        events.append(self._event(number + 3, kind, {"response": response}))
        return "".join(events).encode()

    def error(self, error: ApiError) -> bytes:
        """The event of a stream that breaks although its response goes on."""
        body = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": _PROLOGUE + len(self._texts),
        }
        return f"event: error\ndata: {_json(body)}\n\n".encode()

    def _begin(self) -> str:
        if self._began:
            return ""
        self._began = True
        queued = response_object(self._head, State.QUEUED)
        running = response_object(self._head, State.RUNNING)
        item = message_item(self._head.id, "", "in_progress")
        part = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return (
            self._event(0, "created", {"response": queued})
            + self._event(1, "in_progress", {"response": running})
            + self._event(2, "output_item.added", {"output_index": 0, "item": item})
            + self._event(3, "content_part.added", {**part, "part": text_part("")})
        )

    def _event(self, number: int, kind: str, fields: dict[str, Any]) -> str:
        if number <= self._after:
            return ""
        name = f"response.{kind}"
        data = _json({"type": name, **fields, "sequence_number": number})
        return f"event: {name}\nid: {number + 1}\ndata: {data}\n\n"


def _token_texts(chunk: Chunk) -> list[tuple[int, str]]:
    """Index and text of each token; where text cannot be cut, the last token has all of it."""
    count = len(chunk.token_ids)
    if count == 1 or not chunk.text_lengths:
        texts = [""] * (count - 1) + [chunk.text]
    else:
        data, at, texts = chunk.text.encode(), 0, []
        for length in chunk.text_lengths:
            texts.append(data[at : at + length].decode())
            at += length
    return [(chunk.start + offset, text) for offset, text in enumerate(texts)]


def _json(value: dict[str, Any]) -> str:
    """JSON without line ends of any kind."""
    return json.dumps(value, separators=(",", ":"))

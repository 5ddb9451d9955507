"""The events of chat and completions, as a pure function of the token log.

An event's ``id`` is the index of the first token that it does not hold: where a reader goes on that
has seen it. Events of a token are made by joining prepared pieces; only the text itself is escaped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from penstock.shared.protocol import Chunk, End, Reason
from penstock.shared.protocol.events import Run

from ..api_errors import ApiError, end_error
from ..sse import DONE, quoted
from .field_table import FieldTable
from .usage_object import usage_object

__all__ = ["FINISH_REASONS", "AnswerHead", "ChatWriter", "CompletionWriter"]

FINISH_REASONS = {Reason.STOP: "stop", Reason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What stands in every event and object of an answer.

    Attributes:
        id: the request's id.
        created: when it was accepted, in seconds since 1970.
        model: the model's name.
        tier: the service tier that was used.
    """

    id: str
    created: int
    model: str
    tier: str


class _Writer:
    """Writes the events of one answer.

    Args:
        head: what stands in every event.
        fields: the endpoint's fields, for names in errors.
        usage: whether token counts follow in an event of their own.
        token_ids: whether choices name their tokens' ids.
    """

    object_name: str

    def __init__(
        self, head: AnswerHead, fields: FieldTable, *, usage: bool, token_ids: bool
    ) -> None:
        names = {
            "id": head.id,
            "object": self.object_name,
            "created": head.created,
            "model": head.model,
            "service_tier": head.tier,
        }
        self._head = "\ndata: " + json.dumps(names, separators=(",", ":"))[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if usage else "]}\n\n"
        self._fields = fields
        self._usage = usage
        self._token_ids = token_ids
        self._parted = False

    def chunk(self, chunk: Chunk) -> bytes:
        """One event for each run of tokens; none for tokens that add nothing to be shown."""
        self._parted = self._parted or bool(chunk.parts)
        index = chunk.start
        events = []
        for run in chunk.runs():
            index += len(run.token_ids)
            choice = self._choice(run)
            if choice:
                events.append(f"id: {index}{self._head}{choice}{self._tail}")
        return "".join(events).encode()

    def end(self, end: End) -> bytes:
        """The reason, the token counts, and the mark of success.

        Raises:
            ApiError: the request was not completed.
        """
        error = end_error(end, self._fields.names, self._fields.prompt)
        if error is not None:
            raise error
        events = ""
        if not self._parted:
            choice = self._last_choice(FINISH_REASONS[end.reason])
            events = f"id: {end.n}{self._head}{choice}{self._tail}"
        if self._usage and end.usage is not None:
            usage = json.dumps(usage_object(end.usage), separators=(",", ":"))
            events += f'id: {end.n}{self._head}],"usage":{usage}}}\n\n'
        return events.encode() + DONE

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream without success."""
        return b"data: " + error.body() + b"\n\n"

    def _choice(self, run: Run) -> str:
        raise NotImplementedError

    def _last_choice(self, reason: str) -> str:
        raise NotImplementedError

    def _finish(self, run: Run) -> str:
        return "null" if run.reason is None else f'"{FINISH_REASONS[run.reason]}"'

    def _ids(self, run: Run) -> str:
        return f',"token_ids":{json.dumps(run.token_ids)}' if self._token_ids else ""

    def _is_mute(self, run: Run) -> bool:
        """Whether a run shows nothing: the half of a character, or what may become a stop text."""
        return not (run.text or run.start == 0 or run.reason is not None or self._token_ids)


class ChatWriter(_Writer):
    """Events ``chat.completion.chunk``."""

    object_name = "chat.completion.chunk"

    def _choice(self, run: Run) -> str:
        if self._is_mute(run):
            return ""
        role = '"role":"assistant",' if run.start == 0 else ""
        return (
            f'{{"index":{run.choice},"delta":{{{role}"content":{quoted(run.text)}}}'
            f',"logprobs":null,"finish_reason":{self._finish(run)}{self._ids(run)}}}'
        )

    def _last_choice(self, reason: str) -> str:
        return f'{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}'


class CompletionWriter(_Writer):
    """Events ``text_completion``."""

    object_name = "text_completion"

    def _choice(self, run: Run) -> str:
        if self._is_mute(run):
            return ""
        return (
            f'{{"index":{run.choice},"text":{quoted(run.text)}'
            f',"logprobs":null,"finish_reason":{self._finish(run)}{self._ids(run)}}}'
        )

    def _last_choice(self, reason: str) -> str:
        return f'{{"index":0,"text":"","logprobs":null,"finish_reason":"{reason}"}}'

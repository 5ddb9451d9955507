"""The events of chat and completions, as a pure function of the token log.

An event's ``id`` is the index of the first token that it does not hold: where a reader goes on that
has seen it. Events of a token are made by joining prepared pieces; only the text itself is escaped.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shared.protocol.chat.deltas import ReasoningCount, cut_deltas
from penstock.shared.protocol.events import Chunk, End, Run, TokenLogprobs
from penstock.shared.protocol.states import Reason

from ..answering.sse import DONE, quoted
from ..api_errors import ApiError, end_error, invalid
from .answer_form import AnswerForm
from .chat_deltas import delta_object, has_call
from .fields.field_table import FieldTable
from .token_logprobs import TokenNames
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
    """

    id: str
    created: int
    model: str


class _Writer(ABC):
    """Writes the events of one answer.

    Args:
        head: what stands in every event.
        form: what the client asked to see.
        fields: the endpoint's fields, for names in errors.
        names: of the model's tokens.
        start: the first token wanted. What comes before it is read, too, where events depend on
            it, see :attr:`AnswerForm.reads_all`, and not shown.
    """

    object_name: str

    def __init__(
        self,
        head: AnswerHead,
        form: AnswerForm,
        fields: FieldTable,
        names: TokenNames,
        start: int = 0,
    ) -> None:
        common = {
            "id": head.id,
            "object": self.object_name,
            "created": head.created,
            "model": head.model,
            "service_tier": form.tier,
        }
        self._head = "\ndata: " + json.dumps(common, separators=(",", ":"))[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if form.usage else "]}\n\n"
        self._id = head.id
        self._form = form
        self._fields = fields
        self._names = names
        self._start = start
        self.position = start
        self._of_prompt: Sequence[TokenLogprobs | None] = ()
        self._parted = form.several
        self._calling: set[int] = set()  # choices that call tools
        self._offsets: dict[int, int] = {}  # characters of each choice, where they are shown

    def opening(self) -> bytes:
        """Every event has tokens."""
        return b""

    def chunk(self, chunk: Chunk) -> bytes:
        """One event for each run of tokens; none for tokens that add nothing to be shown."""
        self.position = max(self.position, chunk.stop)
        self._parted = self._parted or bool(chunk.parts)
        self._of_prompt = chunk.prompt_logprobs or self._of_prompt
        if chunk.start < self._start:
            skipped = min(chunk.stop, self._start) - chunk.start
            self._skip(chunk, skipped)
            if skipped == len(chunk.token_ids):
                return b""
            chunk = chunk.without(skipped)
        index = chunk.start
        events = []
        for run in chunk.runs():
            index += len(run.token_ids)
            choice = self._choice(run)
            if choice:
                events.append(self._event(index, choice))
        return "".join(events).encode()

    def end(self, end: End) -> bytes:
        """The reason, the token counts, and the mark of success.

        Raises:
            ApiError: the request was not completed, or has fewer tokens than its reader knows.
        """
        error = end_error(end, self._fields.names, self._fields.prompt)
        if error is not None:
            raise error
        if self._start > end.n:
            allowed = f"0 to {end.n}: request {self._id!r} ended after {end.n} tokens"
            raise invalid("from", f"from: got {self._start}; allowed: {allowed}")
        events = ""
        if not self._parted:
            choice = self._last_choice(FINISH_REASONS[end.reason])
            events = self._event(end.n, choice)
        if self._form.usage and end.usage is not None:
            counts = usage_object(end.usage, self._reasoning_tokens())
            usage = json.dumps(counts, separators=(",", ":"))
            events += f'id: {end.n}{self._head}],"usage":{usage}}}\n\n'
        return events.encode() + DONE

    def _event(self, index: int, choice: str) -> str:
        prompt = self._form.prompt_tokens
        if not prompt:
            return f"id: {index}{self._head}{choice}{self._tail}"
        usage = (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{index}'
            f',"total_tokens":{prompt + index}}}'
        )
        return f'id: {index}{self._head}{choice}],"usage":{usage}}}\n\n'

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream without success."""
        return b"data: " + error.body() + b"\n\n"

    @abstractmethod
    def _skip(self, chunk: Chunk, count: int) -> None:
        """Note what later events depend on, in the first ``count`` tokens."""

    @abstractmethod
    def _choice(self, run: Run) -> str:
        """One of ``choices`` as JSON; empty for tokens that add nothing to be shown."""

    @abstractmethod
    def _last_choice(self, reason: str) -> str:
        """The choice of the last event, with the reason."""

    def _reasoning_tokens(self) -> int | None:
        """How many tokens brought reasoning; None for answers that are not taken apart."""
        return None

    def _finish(self, run: Run) -> str:
        return "null" if run.reason is None else f'"{FINISH_REASONS[run.reason]}"'

    def _ids(self, run: Run) -> str:
        return f',"token_ids":{json.dumps(run.token_ids)}' if self._form.token_ids else ""

    def _is_mute(self, run: Run) -> bool:
        """Whether a run shows nothing: the half of a character, or what may become a stop text."""
        return not (
            run.text
            or run.start == 0
            or run.reason is not None
            or run.logprobs
            or self._form.token_ids
        )


class ChatWriter(_Writer):
    """Events ``chat.completion.chunk`` of an answer that workers parsed."""

    object_name = "chat.completion.chunk"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reasoning: defaultdict[int, ReasoningCount] = defaultdict(ReasoningCount)

    def _choice(self, run: Run) -> str:
        deltas = run.deltas
        if self._form.usage:
            self._reasoning[run.choice].add(deltas, run.start)
        if deltas and has_call(deltas):
            self._calling.add(run.choice)
        shows = deltas or run.start == 0 or run.reason is not None or run.logprobs
        if not (shows or self._form.token_ids):
            return ""
        delta = (
            delta_object(self._id, run.choice, deltas, self._form.reasoning_field) if deltas else ""
        )
        if run.start == 0:
            content = "" if '"content":' in delta else ',"content":""'
            delta = f'"role":"assistant"{content}{"," if delta else ""}{delta}'
        return (
            f'{{"index":{run.choice},"delta":{{{delta}}}'
            f',"logprobs":{self._logprobs(run)},"finish_reason":{self._finish(run)}'
            f"{self._ids(run)}}}"
        )

    def _skip(self, chunk: Chunk, count: int) -> None:
        for run in chunk.runs():
            deltas = cut_deltas(run.deltas, 0, count)
            self._reasoning[run.choice].add(deltas, run.start)
            if has_call(deltas):
                self._calling.add(run.choice)
            count -= len(run.token_ids)

    def _reasoning_tokens(self) -> int:
        return sum(count.tokens for count in self._reasoning.values())

    def _finish(self, run: Run) -> str:
        if run.reason is None:
            return "null"
        return f'"{self._reason(run.choice, FINISH_REASONS[run.reason])}"'

    def _reason(self, choice: int, reason: str) -> str:
        return "tool_calls" if reason == "stop" and choice in self._calling else reason

    def _logprobs(self, run: Run) -> str:
        if not run.logprobs:
            return "null"
        return json.dumps(self._names.chat(run.token_ids, run.logprobs), separators=(",", ":"))

    def _last_choice(self, reason: str) -> str:
        shown = self._reason(0, reason)
        return f'{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"{shown}"}}'


class CompletionWriter(_Writer):
    """Events ``text_completion``."""

    object_name = "text_completion"

    def _choice(self, run: Run) -> str:
        if self._is_mute(run):
            return ""
        text = self._form.echo + run.text if run.start == 0 else run.text
        return (
            f'{{"index":{run.choice},"text":{quoted(text)}'
            f',"logprobs":{self._logprobs(run)},"finish_reason":{self._finish(run)}'
            f"{self._ids(run)}}}"
        )

    def _logprobs(self, run: Run) -> str:
        if not run.logprobs:
            return "null"
        offset = self._offsets.get(run.choice, 0)
        ids: Sequence[int] = run.token_ids
        logprobs: Sequence[TokenLogprobs | None] = run.logprobs
        if run.start == 0 and self._form.echo_ids:
            ids, logprobs = (*self._form.echo_ids, *ids), (*self._of_prompt, *logprobs)
        found = self._names.completion(ids, logprobs, offset)
        self._advance(run)
        return json.dumps(found, separators=(",", ":"))

    def _advance(self, run: Run) -> None:
        echoed = self._form.echo_ids if run.start == 0 else ()
        length = sum(len(self._names.text(token_id)) for token_id in (*echoed, *run.token_ids))
        self._offsets[run.choice] = self._offsets.get(run.choice, 0) + length

    def _skip(self, chunk: Chunk, count: int) -> None:
        for run in chunk.runs():
            skipped = run.token_ids[:count]
            self._advance(run._replace(token_ids=skipped))
            count -= len(skipped)

    def _last_choice(self, reason: str) -> str:
        return f'{{"index":0,"text":"","logprobs":null,"finish_reason":"{reason}"}}'

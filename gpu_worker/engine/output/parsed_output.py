"""The output of a sequence whose answer is parsed: with each token its deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.shared.protocol.chat.deltas import Delta, moved_deltas

from ..config import EngineConfig
from ..requests.engine_request import Finish, Update
from ..sequence import Sequence
from .output_state import OutputState
from .text_stream import AnswerParser, TextStream

__all__ = ["ParsedOutput"]


class ParsedOutput(OutputState):
    """An :class:`OutputState` that parses what it publishes.

    The parser reads the published text with the special tokens put back where they were, because
    they are what marks reasoning and calls. It never sees a stop string or what follows one, nor
    the token that ended the output.
    """

    __slots__ = ("_parser", "_released", "_special")

    def __init__(
        self, sequence: Sequence, stream: TextStream, config: EngineConfig, parser: AnswerParser
    ) -> None:
        self._parser = parser
        self._special = _SpecialTokens(stream, parser.special_texts)
        self._released = 0  # characters of text that the parser has read
        super().__init__(sequence, self._special, config)

    def append(self, token_ids: tuple[int, ...]) -> Update:
        """See :meth:`OutputState.append`."""
        update = super().append(token_ids)
        update.deltas = self._parse(update.text, ended=update.finish is not None)
        return update

    def close(self, update: Update, finish: Finish) -> None:
        """See :meth:`OutputState.close`."""
        before = len(update.text)
        super().close(update, finish)
        deltas = self._parse(update.text[before:], ended=True)
        update.deltas += moved_deltas(deltas, len(update.token_ids) - 1)

    def _parse(self, text: str, *, ended: bool) -> tuple[Delta, ...]:
        """What newly published text adds, and the special tokens in and right behind it."""
        deltas: list[Delta] = []
        begin, stop = self._released, self._released + len(text)
        at = begin
        while (special := self._special.take(stop)) is not None:
            position, name = special
            deltas += self._parser.feed(text[at - begin : position - begin] + name)
            at = position
        if at < stop:
            deltas += self._parser.feed(text[at - begin :])
        self._released = stop
        if ended:
            deltas += self._parser.finish()
        return tuple(deltas)


class _SpecialTokens:
    """A text stream that notes at which character of the text a special token came."""

    def __init__(self, stream: TextStream, texts: Mapping[int, str]) -> None:
        self._stream = stream
        self._texts = texts
        self._length = 0
        self._noted: deque[tuple[int, str]] = deque()

    def feed(self, token_id: int) -> str:
        text = self._stream.feed(token_id)
        self._length += len(text)
        if (special := self._texts.get(token_id)) is not None:
            self._noted.append((self._length, special))
        return text

    def flush(self) -> str:
        return self._stream.flush()

    def take(self, stop: int) -> tuple[int, str] | None:
        """The next special token whose place is at most ``stop``, and that place."""
        if self._noted and self._noted[0][0] <= stop:
            return self._noted.popleft()
        return None

"""The output of one sequence: its text, and the rules that end it."""

from __future__ import annotations

from penstock.shared.protocol import Reason

from .config import EngineConfig
from .requests import Finish
from .sequence import Sequence
from .text import StopMatcher, TextStream

__all__ = ["Output"]

_STOP = Finish(Reason.STOP)
_LENGTH = Finish(Reason.LENGTH)


class Output:
    """Appends sampled tokens to a sequence and says what text they add and whether it has ended.

    The rules, in this order:

    1. a stop token id, or EOS unless ignored: STOP; the token counts and adds no text,
    2. a stop string: STOP; its tokens count, the text ends before it,
    3. ``max_tokens``, or a full context: LENGTH.

    Where the output ends, held-back text is released. Text and end are a function of the token ids
    alone, not of steps or workers: replaying the ids of a request gives the state another worker
    had, including whether it has ended.
    """

    def __init__(self, sequence: Sequence, stream: TextStream, config: EngineConfig) -> None:
        options = sequence.options
        self.sequence = sequence
        self._stream = stream
        self._matcher = StopMatcher(options.stop)
        self._max_tokens = min(
            options.max_tokens, config.max_model_len - sequence.num_prompt_tokens
        )
        self._stop_ids = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            self._stop_ids |= config.eos_token_ids

    def append(self, token_id: int) -> tuple[str, Finish | None]:
        """Add the next output token; return the text it adds, and the end if this is it."""
        sequence, matcher = self.sequence, self._matcher
        sequence.token_ids.append(token_id)
        if token_id in self._stop_ids:
            return self.flush(), _STOP
        text = matcher.feed(self._stream.feed(token_id))
        if matcher.matched is not None:
            return text, _STOP
        if sequence.num_output_tokens < self._max_tokens:
            return text, None
        text += self.flush()
        # Half a character that is released only now may complete a stop string.
        return text, _LENGTH if matcher.matched is None else _STOP

    def flush(self) -> str:
        """Release the text held back by the detokeniser and the stop matcher."""
        text = self._matcher.feed(self._stream.flush())
        return text + self._matcher.flush()

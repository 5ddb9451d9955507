"""The output of one sequence: its text, and the rules that end it."""

from __future__ import annotations

from penstock.shared.protocol.chat.deltas import moved_deltas
from penstock.shared.protocol.states import Reason

from ..config import EngineConfig
from ..requests.engine_request import Finish, Update
from ..sequence import Sequence
from .text_stream import StopMatcher, TextStream

__all__ = ["OutputState"]

_STOP = Finish(Reason.STOP)
_LENGTH = Finish(Reason.LENGTH)


class OutputState:
    """Appends sampled tokens to a sequence and says what text they add and whether it has ended.

    The rules, in this order:

    1. a stop token id, or EOS unless ignored: STOP; the token counts and adds no text,
    2. a stop string: STOP; its tokens count, the text ends before it,
    3. ``max_tokens``, or a full context: LENGTH.

    Where the output ends, held-back text is released. Text and end depend on the token ids alone,
    not on steps or workers. Replaying a request's ids gives the state another worker had, including
    whether it has ended.
    """

    __slots__ = ("_full", "_matcher", "_prompt_tokens", "_stop_ids", "_stream", "sequence")

    def __init__(self, sequence: Sequence, stream: TextStream, config: EngineConfig) -> None:
        options = sequence.options
        self.sequence = sequence
        self._stream = stream
        self._matcher = StopMatcher(options.stop) if options.stop else None
        self._prompt_tokens = sequence.num_prompt_tokens
        # Prompt and output tokens at which the output is as long as it may be.
        self._full = min(sequence.num_prompt_tokens + options.max_tokens, config.max_model_len)
        self._stop_ids = options.ending_ids(config.eos_token_ids)

    def has_room(self, most: int) -> bool:
        """Whether the output's length lets it go on after its next token.

        Args:
            most: prompt and output tokens after which none follows.
        """
        num_tokens = len(self.sequence.token_ids) + 1
        return num_tokens < self._full and num_tokens <= most

    def ends_with(self, token_id: int) -> bool:
        """Whether the output ends with this token, whatever its text is."""
        return token_id in self._stop_ids

    def append(self, token_ids: tuple[int, ...]) -> Update:
        """Add the next output token, one id; what it adds, and the end if this is it."""
        (token_id,) = token_ids
        sequence, matcher, finish = self.sequence, self._matcher, None
        known = sequence.token_ids
        start = len(known) - self._prompt_tokens
        known.append(token_id)
        if token_id in self._stop_ids:
            text, finish = self.flush(), _STOP
        else:
            text = self._stream.feed(token_id)
            if matcher is not None:
                text = matcher.feed(text)
                finish = _STOP if matcher.matched is not None else None
            if finish is None and len(known) >= self._full:
                text += self.flush()
                # Half a character that is released only now may complete a stop string.
                finish = _STOP if matcher is not None and matcher.matched is not None else _LENGTH
        # By position: keywords would double the time this takes, and it is done for every token.
        return Update(
            sequence.id,
            start,
            token_ids,
            text,
            finish,
            self._prompt_tokens,
            sequence.num_cached_tokens,
        )

    def append_run(self, token_ids: tuple[int, ...], most: int) -> Update:
        """Add accepted drafts and what comes after them, one by one, until the output ends.

        Args:
            token_ids: at least one.
            most: prompt and output tokens after which no more are taken.

        Returns:
            One update of those that were taken.
        """
        update = self.append(token_ids[:1])
        known = self.sequence.token_ids
        for count in range(1, len(token_ids)):
            if update.finish is not None or len(known) > most:
                break
            before = sum(update.text_lengths)
            update.text_lengths += (len(update.text.encode()) - before,)
            more = self.append(token_ids[count : count + 1])
            update.token_ids += more.token_ids
            update.text += more.text
            update.finish = more.finish
            if more.deltas:
                update.deltas += moved_deltas(more.deltas, count)
        return update

    def close(self, update: Update, finish: Finish) -> None:
        """End the output with an update that does not end it by its own rules."""
        update.text += self.flush()
        update.finish = finish

    def flush(self) -> str:
        """Release the text held back by the detokeniser and the stop matcher."""
        text = self._stream.flush()
        if self._matcher is None:
            return text
        return self._matcher.feed(text) + self._matcher.flush()

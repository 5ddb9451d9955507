"""When a worker's memory of outputs takes them in: a few tokens a step."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..sequence import Sequence
from .draft_state import DraftState
from .text_memory import TextMemory

__all__ = ["OutputMemory"]

_LEARNING = 16
"""Tokens of outputs that have ended, taken in after each step (some 30 us)."""

_LEARNING_EACH = 32
"""The last tokens of a sequence that drafts, taken in before each step: more than a step gives."""

_OUTPUTS_A_LESSON = 4
"""Of outputs that had no drafts, one in so many is taken in: a worker whose drafts do not pay gives
next to no time for them."""

_MOST_WAITING = 64
"""Outputs that wait. Where more end than can be taken in, those that are taken in are a sample."""


class _Waiting(NamedTuple):
    """An output that is to be taken in.

    Attributes:
        token_ids: prompt and output of a sequence that has ended.
        begin: the first that is not taken in.
        salt: the sequence's.
    """

    token_ids: list[int]
    begin: int
    salt: bytes


class OutputMemory:
    """Drafts from what the outputs of all sequences have said, prompts excepted.

    What one with another ``cache_salt`` has said is never proposed.
    """

    def __init__(self) -> None:
        self._memory = TextMemory()
        self._waiting: deque[_Waiting] = deque()
        self._left_out = 0  # outputs since the last that was taken in

    def propose(
        self, sequence: Sequence, state: DraftState, most: int, least: float
    ) -> tuple[int, ...]:
        """Up to ``most`` drafts, each with a chance of ``least`` or more; see ``state.chances``.

        Args:
            sequence: the sequence, whose last tokens are taken in.
            state: of that sequence.
            most: at least 1.
            least: as in :meth:`.TextMemory.propose`.
        """
        token_ids = sequence.token_ids
        stop = len(token_ids)
        begin = max(state.num_learned, sequence.num_prompt_tokens, stop - _LEARNING_EACH)
        self._memory.learn(token_ids, begin, stop, sequence.cache_salt)
        state.num_learned = stop
        drafts, state.chances = self._memory.propose(token_ids, most, least, sequence.cache_salt)
        return drafts

    def end(self, sequence: Sequence, num_learned: int) -> None:
        """Take in the rest of an output that has ended, in the steps to come, or leave it out.

        Args:
            sequence: the sequence; it does not change any more.
            num_learned: its first tokens, which are not missing; 0: it had no drafts.
        """
        if not num_learned:
            self._left_out = (self._left_out + 1) % _OUTPUTS_A_LESSON
            if self._left_out:
                return
        begin = max(num_learned, sequence.num_prompt_tokens)
        if begin < len(sequence.token_ids) and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(_Waiting(sequence.token_ids, begin, sequence.cache_salt))

    def learn_some(self) -> None:
        """Take in some of what waits."""
        if not self._waiting:
            return
        token_ids, begin, salt = self._waiting.popleft()
        stop = min(len(token_ids), begin + _LEARNING)
        self._memory.learn(token_ids, begin, stop, salt)
        if stop < len(token_ids):
            self._waiting.appendleft(_Waiting(token_ids, stop, salt))

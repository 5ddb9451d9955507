"""Where an output is in its constraint, and the masks of what may follow.

A state depends on the constraint and the output's ids alone, so nothing of it is stored or sent. A
worker that continues a request replays its ids, and stands where the first one stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .matcher import ConstraintError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ConstraintFollower", "ConstraintState", "MatcherPosition"]

_QUICK_S = 0.001
"""Longest time of a mask for a sequence to get drafts; most masks take a tenth of it."""


class MatcherPosition:
    """A position in a constraint.

    Args:
        matcher: belongs to this position alone.
        num_words: 32-bit words of a mask.
        stop_token_ids: ids that may come where the output may end.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._stop_token_ids = tuple(stop_token_ids)

    def copy(self) -> MatcherPosition:
        """The same position, to advance by other ids. Takes a microsecond."""
        return MatcherPosition(self._matcher.deep_copy(), self._num_words, self._stop_token_ids)

    def empty_mask(self) -> Tensor:
        """Allows nothing: int32 ``[num_words]`` on the host."""
        return torch.zeros(self._num_words, dtype=torch.int32)

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance by these ids; :meth:`advance` finds whether they were wrong."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))

    def advance(self, token_ids: Sequence[int], mask: Tensor) -> None:
        """Advance by these ids, and make the mask of what may follow.

        Args:
            token_ids: none to stay here.
            mask: to be filled: bit ``i % 32`` of word ``i // 32`` tells whether token ``i`` may
                come next.

        Raises:
            ConstraintError: nothing may follow.
        """
        self.skip(token_ids)
        matcher = self._matcher
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if matcher.is_error():
            raise ConstraintError(first_line(matcher.get_error()))
        if self._stop_token_ids and matcher.is_accepting():
            bits = mask.numpy().view("uint32")
            for token_id in self._stop_token_ids:
                bits[token_id >> 5] |= 1 << (token_id & 31)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, may follow in a row; nothing changes."""
        return self._matcher.validate_tokens(list(token_ids))


class ConstraintState:
    """Where one output is in its constraint. Used by one thread at a time.

    Args:
        field: the request's field, for messages.
        position: the beginning of the output.
    """

    def __init__(self, field: str, position: MatcherPosition) -> None:
        self.field = field
        self._position = position
        self._masks = [position.empty_mask()]
        self._num_made = 0

    def fill(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Advance by these output ids; make the masks of what may follow them and each draft.

        The state does not advance by drafts: the next call says which of them became output. Behind
        a draft that leaves the constraint, or makes it too complex, the masks allow nothing.

        Raises:
            ConstraintError: nothing may follow the output.
        """
        self._num_made = 0
        self._position.advance(token_ids, self._masks[0])
        self._num_made = 1
        if not drafts:
            return
        ahead = self._position.copy()
        for number, draft in enumerate(drafts, start=1):
            if number == len(self._masks):
                self._masks.append(ahead.empty_mask())
            try:
                ahead.advance((draft,), self._masks[number])
            except ConstraintError:
                return
            self._num_made = number + 1

    def masks(self, count: int) -> list[Tensor]:
        """``count`` masks int32 ``[words]`` on the host: of the next token, and behind each draft.

        They are those of the last :meth:`fill`.
        """
        made = self._masks[: min(count, self._num_made)]
        return made + [self._position.empty_mask() for _ in range(count - len(made))]

    def ahead(self) -> MatcherPosition:
        """A copy of the position after the last :meth:`fill`."""
        return self._position.copy()

    def allowed_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, may follow the output in a row.

        The output is that of the last :meth:`fill`; nothing changes.
        """
        return self._position.num_valid(token_ids)


class ConstraintFollower:
    """A sequence's constraint state, shared between its step and the threads that make masks.

    It implements the protocol that the engine asks, :mod:`penstock.gpu_worker.engine.sequence`.

    Attributes:
        state: while ``busy`` it belongs to a thread of the mask maker.
        num_followed: output tokens that were handed to that thread.
        drafts: the drafts behind them.
        busy: a thread has it, or will have it.
        late: a step has waited for its mask in vain.
        began: monotonic time in seconds when a thread took it; infinite while none has yet.
        seconds: CPU time of each of the last masks.
        error: why the output cannot continue.
    """

    __slots__ = (
        "began",
        "busy",
        "drafts",
        "error",
        "late",
        "num_followed",
        "seconds",
        "state",
    )

    def __init__(self, state: ConstraintState) -> None:
        self.state = state
        self.num_followed = -1  # the beginning has no mask yet
        self.drafts: tuple[int, ...] = ()
        self.busy = self.late = False
        self.began = self.seconds = 0.0
        self.error: Exception | None = None

    @property
    def may_draft(self) -> bool:
        """Whether no thread has it, and its masks are quick to make.

        A sequence with drafts needs a mask for each, and its step waits for all of them.
        """
        idle = not self.busy and self.error is None and self.num_followed >= 0
        return idle and self.seconds <= _QUICK_S

    def num_allowed(
        self, token_ids: Sequence[int], num_prompt_tokens: int, drafts: Sequence[int]
    ) -> int:
        """How many of ``drafts``, from the first on, may follow an output in a row."""
        new = token_ids[num_prompt_tokens + self.num_followed :]
        return max(0, self.state.allowed_prefix([*new, *drafts]) - len(new))

    def ahead(self, token_ids: Sequence[int], num_prompt_tokens: int) -> MatcherPosition:
        """A copy of the position behind this output, to advance by drafts.

        Args:
            token_ids: prompt and output.
            num_prompt_tokens: how many of them are the prompt.
        """
        position = self.state.ahead()
        position.skip(token_ids[num_prompt_tokens + self.num_followed :])
        return position

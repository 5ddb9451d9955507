"""A constraint on an output, as far as the engine asks about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Constraint"]


class Constraint(Protocol):
    """Follows one output through its schema, regex, grammar or choices, on the model side."""

    @property
    def may_draft(self) -> bool:
        """Whether the masks of drafts would be ready in time for a step."""

    def num_allowed(
        self, token_ids: Sequence[int], num_prompt_tokens: int, drafts: Sequence[int]
    ) -> int:
        """How many of ``drafts``, from the first on, may follow an output in a row.

        Args:
            token_ids: prompt and output.
            num_prompt_tokens: how many of them are the prompt.
            drafts: tokens that may come next.
        """

"""The form an output must have, as far as the engine asks about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Form"]


class Form(Protocol):
    """Follows one output through its form, on the model side."""

    @property
    def may_draft(self) -> bool:
        """Whether it can tell at once what may follow, also behind tokens that only may come."""

    def num_allowed(
        self, token_ids: Sequence[int], num_prompt_tokens: int, drafts: Sequence[int]
    ) -> int:
        """How many of ``drafts``, from the first on, may follow an output in a row.

        Args:
            token_ids: prompt and output.
            num_prompt_tokens: how many of them are the prompt.
            drafts: tokens that may come next.
        """

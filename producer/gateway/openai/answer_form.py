"""What a client asked to see of an answer, as it is kept with the request.

It stands in the request's note, so that any gateway gives the same events again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["AnswerForm"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
        tier: the service tier that was used.
        several: there are several choices, each of which ends with a token of its own.
        usage: token counts follow in an event of their own.
        token_ids: choices name their tokens' ids.
        reasoning_field: name of the field for reasoning.
        echo: text that stands before a completion.
        echo_ids: its tokens, whose log-probabilities are shown, too.
        prompt_tokens: how many tokens the prompt has, if every event shows the token counts so
            far; else 0.
        reads_all: events depend on all tokens before them, so that the log is read from its
            beginning wherever the reader goes on.
    """

    tier: str = "default"
    several: bool = False
    usage: bool = False
    token_ids: bool = False
    reasoning_field: str = "reasoning_content"
    echo: str = ""
    echo_ids: Sequence[int] = ()
    prompt_tokens: int = 0
    reads_all: bool = False

    def to_note(self) -> dict[str, Any]:
        """The form as JSON values, without what is as usual."""
        usual = AnswerForm()
        return {
            name: value
            for name in self.__slots__
            if (value := getattr(self, name)) != getattr(usual, name)
        }

    @classmethod
    def from_note(cls, note: dict[str, Any]) -> Self:
        """The inverse; names that it does not know are of the endpoint or of a later version."""
        return cls(**{name: note[name] for name in cls.__slots__ if name in note})

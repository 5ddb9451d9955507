"""Log-probabilities as OpenAI's API gives them: with the tokens' texts and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.shared.protocol.events import TokenLogprobs

__all__ = ["TokenNames"]

_LEAST = -9999.0
"""What stands for a probability of zero, whose logarithm JSON cannot hold."""


class TokenNames:
    """Texts and bytes of a model's tokens.

    Args:
        vocabulary: bytes by token id, None where there is none; empty if they are not known. A
            token without bytes is called ``token_id:`` and its id.
    """

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        self._vocabulary = vocabulary

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        """The ``logprobs`` of a chat choice; None if none were asked for."""
        if not logprobs:
            return None
        content = [
            {
                **self._entry(token_id, report.logprob),
                "top_logprobs": [self._entry(*one) for one in report.top],
            }
            for token_id, report in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
    ) -> dict[str, Any] | None:
        """The ``logprobs`` of a completion; None if none were asked for.

        Args:
            token_ids: the tokens.
            logprobs: one for each; None for a prompt's first token, which nothing comes before.
            offset: characters of the choice's text before them.
        """
        if not logprobs:
            return None
        texts = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [report and max(_LEAST, report.logprob) for report in logprobs],
            "top_logprobs": [
                report and {self.text(other): max(_LEAST, logprob) for other, logprob in report.top}
                for report in logprobs
            ],
            "text_offset": offsets,
        }

    def text(self, token_id: int) -> str:
        """A token's text; parts of characters show as U+FFFD."""
        found = self._bytes(token_id)
        return f"token_id:{token_id}" if found is None else found.decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes | None:
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else None

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        found = self._bytes(token_id)
        return {
            "token": self.text(token_id),
            "logprob": max(_LEAST, logprob),
            "bytes": None if found is None else list(found),
        }

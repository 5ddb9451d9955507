"""From the tokens of a byte-level vocabulary to text, a table look-up a token."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

from .fast_detokenize import decodes_by_library
from .token_bytes import byte_characters, byte_level

__all__ = ["ByteLevelDetokenizer", "byte_level_words"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_LONGEST_PARTIAL = 3
"""Bytes of a UTF-8 character that is not complete, at most."""


class ByteLevelDetokenizer:
    """The text that a sequence's output adds to its prompt, in pieces.

    Joined, the pieces are those of ``IncrementalDetokenizer``. A byte-level vocabulary decodes to
    its tokens' bytes one after another, and each maximal invalid part becomes one U+FFFD. A piece
    holds back the bytes of an incomplete character, and nothing else.

    Args:
        words: the bytes of every token; empty for those that have no text.
        prompt_ids: the prompt; only its end is looked at.
    """

    def __init__(self, words: Sequence[bytes], prompt_ids: Sequence[int]) -> None:
        self._words = words
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        end = b""
        for token_id in reversed(prompt_ids):
            end = words[token_id] + end
            if len(end) >= _LONGEST_PARTIAL:
                break
        self._decoder.decode(end)
        # What the output does not complete is the prompt's U+FFFD.
        self._completes_prompt = bool(self._decoder.getstate()[0])

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token; empty for half a character."""
        text = self._decoder.decode(self._words[token_id])
        return self._beyond_prompt(text) if self._completes_prompt else text

    def flush(self) -> str:
        """U+FFFD for what stayed incomplete; the output ends here."""
        text = self._decoder.decode(b"", final=True)
        return self._beyond_prompt(text) if self._completes_prompt else text

    def _beyond_prompt(self, text: str) -> str:
        self._completes_prompt = not text
        return text.removeprefix(_REPLACEMENT)


def byte_level_words(
    tokenizer: Any, vocabulary: Sequence[bytes | None]
) -> tuple[bytes, ...] | None:
    """The text of every token as the tokenizer decodes it, special tokens left out.

    Args:
        tokenizer: of transformers.
        vocabulary: see :func:`.token_bytes.token_bytes`.

    Returns:
        None unless the tokenizer decodes by a byte-level vocabulary alone.
    """
    if not vocabulary or not decodes_by_library(tokenizer):
        return None
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
        return None
    words = [word or b"" for word in vocabulary]
    byte_of = byte_characters()
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token_id < len(words):
            words[token_id] = b"" if token.special else byte_level(token.content, byte_of)
    return tuple(words)

"""From token ids to text, token by token, without ever emitting half a character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Decoder", "IncrementalDetokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_LONGEST_PARTIAL = 3
"""Bytes of a UTF-8 character that is not complete, at most; also how many tokens they can be."""

_WINDOW = 24
"""Tokens decoded again with each new one; when it is full, all but ``_CONTEXT`` are let go."""

_CONTEXT = 8
"""More than ``_LONGEST_PARTIAL``, so that pending bytes and the character before them fit."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Decoder(Protocol):
    """What is used of a transformers tokenizer."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """The text of ``token_ids``."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's entry."""

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        """The ids of vocabulary entries; those of the unknown token where there is none."""


class IncrementalDetokenizer:
    """The text that a sequence's output adds to its prompt, in pieces.

    Joined, the pieces are what decoding prompt and output together gives beyond the prompt's text,
    special tokens left out. So the prompt's end decides whether a word has a leading space. A
    character that the prompt left incomplete comes with the token that completes it.

    A token is decoded together with a bounded window of those before it, which makes each token
    O(1). Where the decoded text ends in U+FFFD, the last bytes may begin a character. They are held
    back until later tokens, or :meth:`flush`, decide what they are. Held back is never more than 3
    characters, the bytes of an incomplete one.

    Vocabularies with byte fallback (``<0xE2>``, as SentencePiece has) decode a run of byte tokens
    as a whole. One invalid byte also turns the valid characters around it into U+FFFD. Waiting for
    the end of each run would delay valid text without bound. So this class decodes runs itself, by
    the Unicode standard's rule: valid characters come through, and each maximal invalid part is one
    U+FFFD. Only for invalid UTF-8 does this differ from the tokenizer's own ``decode``.

    The pieces depend on the prompt's and the output's ids alone. So a new instance on another
    worker, fed the same ids, gives the same pieces.

    Args:
        tokenizer: of transformers.
        prompt_ids: the prompt; only its end is looked at.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The window: its ids, their text, and how much of it needs no emission any more.
        self._ids, self._text = self._last_with_text(prompt_ids)
        self._emitted = len(self._text)
        # While the prompt's last character may still be completed: the window without output.
        self._prompt_text = ""
        self._byte_run: _ByteRun | None = None
        self._byte_fallback = _has_byte_fallback(tokenizer)
        if self._byte_fallback:
            self._enter_prompt_bytes(prompt_ids)
        elif self._pending():
            self._emitted -= self._pending()
            self._prompt_text = self._text

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token; empty for half a character."""
        if self._byte_fallback:
            byte = self._byte_of(token_id)
            if byte is not None:
                return self._feed_byte(token_id, byte)
        text = self._end_byte_run()
        self._ids.append(token_id)
        before, self._text = self._text, self._decode(self._ids)
        # Twice, because decoders strip one space at the begin, which may be all a token is.
        if self._text == before and not self._decode([token_id, token_id]):
            self._ids.pop()  # a special token, or no token at all: it must not fill the window
            return text
        text += self._release(self._pending())
        if len(self._ids) > _WINDOW and not self._prompt_text:
            held = len(self._text) - self._emitted
            self._ids, self._text = self._last_with_text(self._ids)
            self._emitted = len(self._text) - held
        return text

    def flush(self) -> str:
        """What was held back, with U+FFFD for what stayed incomplete; the output ends here."""
        return self._end_byte_run() + self._release(0)

    def _release(self, pending: int) -> str:
        """The window's text that was not emitted yet, but for the last ``pending`` characters."""
        end = len(self._text) - pending
        if end <= self._emitted and pending:
            return ""
        if self._prompt_text:
            # Now it shows whether the output completed the prompt's last character. If not, the
            # U+FFFD there are the prompt's.
            if self._text.startswith(self._prompt_text):
                self._emitted = len(self._prompt_text)
            self._prompt_text = ""
        text, self._emitted = self._text[self._emitted : end], max(end, self._emitted)
        return text

    def _pending(self) -> int:
        """How many characters at the end of the window the next tokens might still change."""
        if self._byte_fallback:
            return 0  # incomplete bytes are never in the window's text
        tail = self._text[-_LONGEST_PARTIAL:]
        return len(tail) - len(tail.rstrip(_REPLACEMENT))

    def _last_with_text(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The last ``_CONTEXT`` ids, or as many as it takes for them to have text, and this text.

        Without text before it a word would lose its leading space.
        """
        size = _CONTEXT
        while True:
            ids = list(token_ids[-size:])
            text = self._decode(ids)
            if text or size >= len(token_ids):
                return ids, text
            size *= 2

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    # Runs of byte tokens, in vocabularies with byte fallback

    def _byte_of(self, token_id: int) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return None if match is None else bytes.fromhex(match[1])

    def _enter_prompt_bytes(self, prompt_ids: Sequence[int]) -> None:
        """Take up the run in which the prompt ends; what it says so far is the prompt's text."""
        for token_id in prompt_ids[-_LONGEST_PARTIAL:]:
            byte = self._byte_of(token_id)
            if byte is None:
                self._byte_run = None
            else:
                self._byte_run = self._byte_run or _ByteRun()
                self._byte_run.feed(byte)
        if self._byte_run is not None:
            self._byte_run.has_output = False

    def _feed_byte(self, token_id: int, byte: bytes) -> str:
        self._byte_run = self._byte_run or _ByteRun()
        self._ids.append(token_id)  # as context of what follows
        del self._ids[:-_WINDOW]
        return self._byte_run.feed(byte)

    def _end_byte_run(self) -> str:
        if self._byte_run is None:
            return ""
        text = self._byte_run.end()
        self._byte_run = None
        self._text = self._decode(self._ids)
        self._emitted = len(self._text)
        return text


class _ByteRun:
    """Consecutive byte tokens, decoded as they come."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.has_output = True

    def feed(self, byte: bytes) -> str:
        self.has_output = True
        return self._decoder.decode(byte)

    def end(self) -> str:
        """U+FFFD for an incomplete character; nothing if it is the prompt's alone."""
        return self._decoder.decode(b"", final=True) if self.has_output else ""


def _has_byte_fallback(tokenizer: Decoder) -> bool:
    """Whether ``<0xE2>`` and the like are bytes to this tokenizer, and not just names."""
    ids = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    known = [token_id for token_id in ids if token_id is not None]
    return len(known) == 3 and "€" in tokenizer.decode(
        known, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )

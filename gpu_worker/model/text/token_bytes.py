"""The bytes of every token of a tokenizer, for those who show tokens without having a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["byte_characters", "byte_level", "token_bytes"]


def token_bytes(tokenizer: Any, vocab_size: int) -> tuple[bytes | None, ...]:
    """Return the bytes of the tokens ``0`` to ``vocab_size - 1``; None where there is no token.

    A byte-level vocabulary writes each byte as one character (Radford et al., 2019, "Language
    Models are Unsupervised Multitask Learners"). Others write a space as U+2581, and bytes outside
    of their characters as ``<0x0A>`` (Kudo and Richardson, 2018, "SentencePiece"). Added tokens
    stand for themselves. It takes about a microsecond a token.

    Args:
        tokenizer: of transformers.
        vocab_size: width of the model's logits.

    Returns:
        One entry for each id; empty for a tokenizer that is not of the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ()
    is_byte_level = "ByteLevel" in _kinds(backend)
    byte_of = byte_characters()
    found: list[bytes | None] = [None] * vocab_size
    for text, index in tokenizer.get_vocab().items():
        if index < vocab_size:
            found[index] = byte_level(text, byte_of) if is_byte_level else _with_spaces(text)
    for index, token in tokenizer.added_tokens_decoder.items():
        if index < vocab_size:
            found[index] = str(token).encode()
    return tuple(found)


def _kinds(backend: Any) -> str:
    """The names of the backend's decoder and pre-tokenizer, and of what they consist of."""
    return "".join(
        part.__getstate__().decode(errors="replace")
        for part in (backend.decoder, backend.pre_tokenizer)
        if part is not None
    )


def byte_characters() -> Mapping[str, int]:
    """Which byte a character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves; the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def byte_level(text: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes of a byte-level vocabulary's entry; a text outside of its characters is itself.

    Args:
        text: the entry.
        byte_of: see :func:`byte_characters`.
    """
    try:
        return bytes(map(byte_of.__getitem__, text))
    except KeyError:
        return text.encode()


def _with_spaces(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            return text.encode()
    return text.replace("\u2581", " ").encode()

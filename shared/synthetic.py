"""The tokens of ``--model synthetic``: a pure function of seed, choice, index and token before.

Workers generate by it and fault storms check by it, so it belongs to neither. A stream that another
worker continued must equal an undisturbed one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

__all__ = ["SYNTHETIC", "next_token", "synthetic_tokens"]

SYNTHETIC = "synthetic"
"""The model path that names it."""

_FIRST_LETTER, _LETTERS = 97, 26


def next_token(seed: int, index: int, last: int, choice: int = 0) -> int:
    """The token at an output index: a lower-case letter's code point.

    Args:
        seed: the request's seed in force.
        index: the output index.
        last: the token before it; for index 0 the prompt's last one.
        choice: which of the request's outputs.
    """
    return _FIRST_LETTER + zlib.crc32(struct.pack("<QII", seed, index, last), choice) % _LETTERS


def synthetic_tokens(
    seed: int, prompt_ids: Sequence[int], count: int, choice: int = 0
) -> tuple[int, ...]:
    """What an undisturbed worker generates: ``count`` token ids."""
    tokens: list[int] = []
    for index in range(count):
        last = tokens[-1] if tokens else prompt_ids[-1]
        tokens.append(next_token(seed, index, last, choice))
    return tuple(tokens)

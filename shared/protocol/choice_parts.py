"""Parts of a chunk: which tokens belong to which choice of a request with several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .states import Reason

__all__ = ["Part", "cut_parts", "digest_words", "joined_parts", "read_parts"]


class Part(NamedTuple):
    """Consecutive tokens of a chunk that belong to one choice.

    Attributes:
        choice: the choice's index, from 0 on.
        start: index of the first token in the choice's own output.
        num_tokens: number of tokens, at least 1.
        text: what the tokens add to the choice's text.
        reason: why the choice ended with the last token; None if it goes on.
    """

    choice: int
    start: int
    num_tokens: int
    text: str
    reason: Reason | None = None


def read_parts(wire: Any, num_tokens: int) -> tuple[Part, ...]:
    """Read the parts of a chunk of ``num_tokens`` tokens from msgpack or JSON.

    Raises:
        TypeError, ValueError: the value is malformed.
    """
    if not wire:  # nil or empty: one choice
        return ()
    rows = (_values(row) for row in wire)
    parts = tuple(
        Part(int(choice), int(start), int(count), text, None if reason is None else Reason(reason))
        for choice, start, count, text, reason in rows
    )
    if sum(part.num_tokens for part in parts) != num_tokens:
        raise ValueError("parts of another number of tokens")
    if any(
        p.choice < 0 or p.start < 0 or p.num_tokens < 1 or not isinstance(p.text, str)
        for p in parts
    ):
        raise ValueError("a part of no tokens or no choice")
    return parts


def _values(row: Any) -> Iterable[Any]:
    if isinstance(row, Mapping):  # JSON
        return [row[name] for name in Part._fields]
    return list(row)[: len(Part._fields)]


def joined_parts(before: tuple[Part, ...], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Concatenate parts; the two at the seam become one if they belong to the same choice."""
    if not before or not parts or before[-1].choice != parts[0].choice:
        return before + parts
    one, other = before[-1], parts[0]
    joined = Part(
        one.choice,
        one.start,
        one.num_tokens + other.num_tokens,
        one.text + other.text,
        other.reason,
    )
    return (*before[:-1], joined, *parts[1:])


def digest_words(parts: Sequence[Part], token_ids: Sequence[int], known: int) -> Iterator[int]:
    """Yield the digest's input for several choices: the choice and the id of each token.

    Ids alone would not tell two interleavings of equal choices apart. The first ``known`` tokens
    are left out.
    """
    at = 0
    for part in parts:
        for token_id in token_ids[max(at, known) : at + part.num_tokens]:
            yield part.choice
            yield token_id
        at += part.num_tokens


def cut_parts(parts: Sequence[Part], known: int, text_lengths: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts without their first ``known`` tokens.

    Args:
        parts: of a chunk.
        known: fewer than its tokens.
        text_lengths: bytes of text that came with each of the chunk's tokens; if empty, a part
            that the cut goes through keeps its whole text.
    """
    kept = []
    at = 0
    for part in parts:
        skip = min(max(0, known - at), part.num_tokens)
        if skip < part.num_tokens:
            text = part.text.encode()[sum(text_lengths[at : at + skip]) :].decode()
            kept.append(
                Part(part.choice, part.start + skip, part.num_tokens - skip, text, part.reason)
            )
        at += part.num_tokens
    return tuple(kept)

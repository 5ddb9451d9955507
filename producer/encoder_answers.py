"""What encoders are asked and answer: embeddings, rankings, classes of texts."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import ProtocolError

__all__ = ["Classes", "Embeddings", "Ranking", "as_inputs", "without_defaults"]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some texts.

    Attributes:
        packed: for each text its numbers as little-endian float32.
        tokens: of all texts, special ones included.
    """

    packed: tuple[bytes, ...]
    tokens: int

    @classmethod
    def of(cls, value: Any) -> Embeddings:
        """Read a worker's answer.

        Raises:
            ProtocolError: it is none.
        """
        try:
            packed, tokens = tuple(value["embeddings"]), value["tokens"]
            if not all(type(item) is bytes and len(item) % 4 == 0 for item in packed):
                raise TypeError
            return cls(packed, int(tokens))
        except (KeyError, TypeError, ValueError):
            raise _foreign(value, "embeddings and tokens") from None

    @property
    def vectors(self) -> list[array[float]]:
        """The vectors as arrays of floats, which numpy and torch read without a copy."""
        return [_floats(item) for item in self.packed]

    def json_arrays(self) -> list[str]:
        """The vectors as arrays of JSON, in nine digits, which is exact for float32."""
        return [f"[{','.join(['%.9g'] * len(v)) % tuple(v)}]" for v in self.vectors]


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well documents answer a query.

    Attributes:
        scores: for each document, in the order in which they were given; higher is better.
        tokens: of all pairs of query and document, special ones included.
    """

    scores: tuple[float, ...]
    tokens: int

    @classmethod
    def of(cls, value: Any) -> Ranking:
        """Read a worker's answer.

        Raises:
            ProtocolError: it is none.
        """
        try:
            return cls(tuple(map(float, value["scores"])), int(value["tokens"]))
        except (KeyError, TypeError, ValueError):
            raise _foreign(value, "scores and tokens") from None

    @property
    def order(self) -> list[int]:
        """Indexes of the documents, best first; equal scores in the order of the documents."""
        return sorted(range(len(self.scores)), key=lambda index: -self.scores[index])


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of some texts.

    Attributes:
        labels: names of the classes.
        probs: for each text, the probability of each class.
        tokens: of all texts, special ones included.
    """

    labels: tuple[str, ...]
    probs: tuple[tuple[float, ...], ...]
    tokens: int

    @classmethod
    def of(cls, value: Any) -> Classes:
        """Read a worker's answer.

        Raises:
            ProtocolError: it is none.
        """
        try:
            labels = tuple(map(str, value["labels"]))
            probs = tuple(tuple(map(float, row)) for row in value["probs"])
            if not labels or any(len(row) != len(labels) for row in probs):
                raise ValueError
            return cls(labels, probs, int(value["tokens"]))
        except (KeyError, TypeError, ValueError):
            raise _foreign(value, "labels, probs and tokens") from None

    @property
    def best(self) -> list[str]:
        """For each text, the name of the likeliest class."""
        return [self.labels[row.index(max(row))] for row in self.probs]


def as_inputs(texts: object) -> list[Any]:
    """A list of inputs, of one input or a list: a text and a list of token ids are one input."""
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        return [texts]
    items = list(texts)
    is_ids = bool(items) and all(isinstance(item, int) for item in items)
    return [items] if is_ids else items


def without_defaults(**fields: Any) -> dict[str, Any]:
    """The fields that say something: neither None nor False."""
    return {name: value for name, value in fields.items() if value not in (None, False)}


def _floats(packed: bytes) -> array[float]:
    numbers = array("f", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _foreign(value: object, allowed: str) -> ProtocolError:
    return ProtocolError("result", value, f"a map with {allowed}; another kind of model answered")

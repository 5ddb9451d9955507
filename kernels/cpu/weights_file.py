"""Weights of a program in a file, in the order in which the library reads them.

Such a file is one machine's: it holds what was packed, for one instruction set and one source of
the library. Processes that map it share its pages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .library import Codes, Type

__all__ = ["NUM_EXPONENTS", "MappedPart", "MatrixForm", "WeightsFile"]

NUM_EXPONENTS = 8
"""That three bits can name."""


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """What a matrix is, but for its numbers.

    Attributes:
        outputs: after gating.
        inputs: of each.
        gated: whether there are two weights for each output.
        kind: the weights' type. If they are codes, the type of the rows that codes multiply.
        codes: the kind of codes; None: the weights are in full.
        group: how many inputs share a scale; 0 without codes.
        has_offsets: whether a group of codes has an offset beside its scale.
        values: what the sixteen codes of ``Codes.TABLE4`` stand for; None for other kinds.
        exponents: of nearly all weights, their upper seven bits, where weights have short
            exponents (``src/linear/short_exponents.h``); None: they do not.
        exceptions: how many weights have other exponents.
    """

    outputs: int
    inputs: int
    gated: bool
    kind: Type
    codes: Codes | None = None
    group: int = 0
    has_offsets: bool = False
    values: tuple[float, ...] | None = None
    exponents: tuple[int, ...] | None = None
    exceptions: int = 0

    @property
    def num_weights(self) -> int:
        """Of the whole matrix."""
        return self.outputs * self.inputs * (2 if self.gated else 1)

    def to_json(self) -> dict[str, Any]:
        """For :meth:`of_json`."""
        return asdict(self)

    @classmethod
    def of_json(cls, tree: dict[str, Any]) -> MatrixForm:
        """What :meth:`to_json` gave.

        Raises:
            LookupError, TypeError, ValueError: it is something else.
        """
        codes, values, exponents = tree["codes"], tree["values"], tree["exponents"]
        if exponents is not None and len(exponents) != NUM_EXPONENTS:
            raise ValueError(f"{len(exponents)} exponents, where {NUM_EXPONENTS} have codes")
        return cls(**{
            **tree,
            "kind": Type(tree["kind"]),
            "codes": None if codes is None else Codes(codes),
            "values": None if values is None else tuple(values),
            "exponents": None if exponents is None else tuple(exponents),
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class MappedPart:
    """Stands for a weight ``[outputs, inputs]`` that lies in the file."""

    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(outputs, inputs)``."""
        return self.outputs, self.inputs

    def chunk(self, count: int) -> tuple[MappedPart, ...]:
        """Cut into ``count`` parts of as many outputs each."""
        return (MappedPart(self.outputs // count, self.inputs),) * count


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file with the weights of a program.

    Attributes:
        path: of the file.
        forms: of its matrices, in their order.
        num_bytes: of the file.
    """

    path: Path
    forms: tuple[MatrixForm, ...]
    num_bytes: int

"""A linear layer's weight in codes, as the native library takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .library import Codes

__all__ = ["CodedWeight"]


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """``weight[n, k] = scales[n, g] * value(codes[n, k]) + offsets[n, g]``, ``g = k // group``.

    Attributes:
        kind: what ``value`` is: an entry of ``values``, the code less 8, the code, or e4m3.
        codes: uint8 or int8 ``[outputs, inputs]``, 0 to 15 where a code has four bits.
        scales: float32 ``[outputs, groups]``.
        offsets: float32 ``[outputs, groups]``; None: zeros.
        group: inputs of a group: all, or a multiple of 4 with four bits, of 2 with eight.
        values: float32 ``[16]``, of a table. Products in bfloat16 round them to it.
    """

    kind: Codes
    codes: Tensor
    scales: Tensor
    group: int
    offsets: Tensor | None = None
    values: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(outputs, inputs)``."""
        return self.codes.shape[0], self.codes.shape[1]

    def chunk(self, count: int) -> tuple[CodedWeight, ...]:
        """Cut into ``count`` parts of as many outputs each."""
        parts = (
            t if t is None else t.chunk(count) for t in (self.codes, self.scales, self.offsets)
        )
        none = (None,) * count
        return tuple(
            CodedWeight(self.kind, codes, scales, self.group, offsets, self.values)
            for codes, scales, offsets in zip(*(p or none for p in parts), strict=True)
        )

    def goes_with(self, other: CodedWeight) -> bool:
        """Whether both can be parts of one matrix."""
        return (
            (self.kind, self.group, self.shape[1]) == (other.kind, other.group, other.shape[1])
            and (self.offsets is None) == (other.offsets is None)
            and (
                self.values is None
                or (other.values is not None and self.values.equal(other.values))
            )
        )

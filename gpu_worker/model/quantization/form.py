"""The internal form of a quantised weight: formats unpack into it, kernels repack from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["QuantizedWeight"]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight ``[outputs, inputs]`` as integer codes with a scale for each group of inputs.

    The weight of output ``n`` and code column ``k``, in group ``g = k // group_size``, is

    - ``scales[n, g] * codes[n, k]`` with signed codes,
    - ``scales[n, g] * (codes[n, k] - zeros[n, g])`` with zeros,
    - ``scales[n, g] * codebook[codes[n, k]]`` with a codebook.

    Attributes:
        bits: of one code, 2 to 8; ``codes`` holds one code a byte, whatever their number.
        codes: ``[outputs, inputs]``: int8 without zeros and codebook, ``-2 ** (bits - 1)`` to
            ``2 ** (bits - 1) - 1``; uint8 with either, 0 to ``2 ** bits - 1``.
        scales: float32 ``[outputs, groups]``.
        zeros: float32 ``[outputs, groups]``, in units of codes, not always whole; or None.
        group_size: inputs of a group, of which the last may be shorter; 0: one group of all.
        codebook: float32 ``[2 ** bits]``, what each code stands for; None: codes are numbers.
        permutation: int64 ``[inputs]``: code column ``k`` belongs to input ``permutation[k]``
            (GPTQ's ``desc_act``); None: to input ``k``.

    Raises:
        ValueError: shapes, dtypes or values do not fit one another.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_size: int = 0
    codebook: Tensor | None = None
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        _require(2 <= self.bits <= 8, f"codes of {self.bits} bits; allowed: 2 to 8")
        _require(self.group_size >= 0, f"a group size of {self.group_size}; allowed: from 0")
        _require(self.codes.dim() == 2 and self.codes.numel() > 0, "codes are a matrix")
        _require(self.zeros is None or self.codebook is None, "a codebook has no zeros")
        signed = self.zeros is None and self.codebook is None
        wanted = torch.int8 if signed else torch.uint8
        _require(self.codes.dtype == wanted, f"codes of {self.codes.dtype}; expected: {wanted}")
        lowest, highest = (int(value) for value in self.codes.aminmax())
        least = -(2 ** (self.bits - 1)) if signed else 0
        _require(
            least <= lowest and highest < least + 2**self.bits,
            f"codes from {lowest} to {highest} do not fit {self.bits} bits",
        )
        shape = (self.outputs, self.groups)
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if values is None:
                continue
            _require(
                tuple(values.shape) == shape and values.dtype == torch.float32,
                f"{name} of {values.dtype} {list(values.shape)}; expected: float32 {list(shape)}",
            )
            _require(bool(values.isfinite().all()), f"{name} that are not finite")
        if self.codebook is not None:
            _require(
                tuple(self.codebook.shape) == (2**self.bits,)
                and self.codebook.dtype == torch.float32,
                f"a codebook of {list(self.codebook.shape)}; expected: float32 [{2**self.bits}]",
            )
        if self.permutation is not None:
            _require(
                torch.equal(
                    self.permutation.sort().values,
                    torch.arange(self.inputs, device=self.permutation.device),
                ),
                "a permutation that does not name each input once",
            )

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        """Columns of the weight."""
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Groups of inputs, each with a scale for each output."""
        return -(-self.inputs // self.group_size) if self.group_size else 1

    def rows(self, outputs: Tensor) -> QuantizedWeight:
        """The weights of some outputs, by an int64 tensor ``[count]`` of their indices."""
        return replace(
            self,
            codes=self.codes[outputs],
            scales=self.scales[outputs],
            zeros=None if self.zeros is None else self.zeros[outputs],
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes in this form, with its scales and zeros."""
        return self.codes.nbytes + self._scale_bytes

    @property
    def packed_bytes(self) -> int:
        """Memory of what kernels make of it: codes of four bits, or of eight."""
        return self.codes.numel() // (2 if self.bits <= 4 else 1) + self._scale_bytes

    @property
    def _scale_bytes(self) -> int:
        return self.scales.nbytes * (1 if self.zeros is None else 2)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on ``device``."""
        if self.codes.device == device:
            return self
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            codebook=None if self.codebook is None else self.codebook.to(device),
            permutation=None if self.permutation is None else self.permutation.to(device),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[outputs, inputs]``: computed in float32, then rounded to ``dtype``."""
        if self.codebook is not None:
            # Four times as fast as indexing.
            flat = self.codebook.index_select(0, self.codes.reshape(-1).int())
            values = flat.view(self.codes.shape)
        elif self.zeros is not None:
            values = self.codes.float() - self._by_input(self.zeros)
        else:
            values = self.codes.float()
        values = values * self._by_input(self.scales)
        if self.permutation is not None:
            ordered = torch.empty_like(values)
            ordered[:, self.permutation] = values
            values = ordered
        return values.to(dtype)

    def _by_input(self, values: Tensor) -> Tensor:
        """``[outputs, groups]`` to what broadcasts against the codes."""
        if self.groups == 1:
            return values
        return values.repeat_interleave(self.group_size, dim=1)[:, : self.inputs]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)

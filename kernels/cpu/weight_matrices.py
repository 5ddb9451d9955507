"""The weights of a program's linear layers, which the library copies into an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .coded_weight import CodedWeight
from .library import Library, Type

__all__ = ["TYPES", "WeightMatrices"]

TYPES = {torch.float32: Type.FLOAT, torch.bfloat16: Type.BF16}


class WeightMatrices:
    """See :meth:`.NativeProgram.matrix`.

    Args:
        library: the library.
        program: the handle of the program that they belong to, which lives longer.
        kind: in which activations are multiplied.
    """

    def __init__(self, library: Library, program: int, kind: Type) -> None:
        self._library = library
        self._program = program
        self._type = kind
        self._unpacked: list[tuple[int, Tensor, int, int]] = []
        self._is_packed = True

    def add(self, weights: Sequence[Tensor | CodedWeight], gated: bool) -> int:
        """The number of a new matrix; codes are copied now, full weights by :meth:`pack`.

        Raises:
            ValueError: the parts do not go together.
        """
        number = self._make(weights, gated)
        self._is_packed = False
        place = 0
        for part, weight in enumerate(weights):
            at = (0, part) if gated else (place, 0)
            if isinstance(weight, CodedWeight):
                self._fill_codes(number, weight, *at)
            else:
                self._unpacked.append((number, weight.detach(), *at))
            place += weight.shape[0]
        return number

    def _make(self, weights: Sequence[Tensor | CodedWeight], gated: bool) -> int:
        first = weights[0]
        inputs = first.shape[1]
        outputs = first.shape[0] if gated else sum(w.shape[0] for w in weights)
        if not isinstance(first, CodedWeight):
            kind = self._kept_as(weights)
            return self._library.checked("matrix", self._program, outputs, inputs, kind, int(gated))
        shape = self._program, outputs, inputs, self._type, int(gated)
        if not all(isinstance(w, CodedWeight) and w.goes_with(first) for w in weights):
            raise ValueError("the parts of a matrix are coded differently")
        values = None if first.values is None else first.values.data_ptr()
        return self._library.checked(
            "coded_matrix", *shape, first.kind, first.group, int(first.offsets is not None), values
        )

    def _kept_as(self, weights: Sequence[Tensor | CodedWeight]) -> Type:
        """Floats of a bfloat16 checkpoint stay in 16 bits: the same results for half the reads."""
        if self._type is Type.FLOAT and all(self._fits_bf16(w) for w in weights):
            return Type.WIDENED
        return self._type

    def _fits_bf16(self, weight: Tensor | CodedWeight) -> bool:
        if isinstance(weight, CodedWeight):
            return False
        source = weight.detach().contiguous().float()
        return bool(self._library.fits_bf16(source.data_ptr(), source.numel()))

    def pack(self) -> None:
        """Copy all full weights that were added, by as many threads as torch computes with."""
        if self._is_packed:
            return
        unpacked, self._unpacked = self._unpacked, []
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(self._fill, unpacked))
        self._library.checked("choose_ways", self._program)
        self._is_packed = True

    def _fill_codes(self, number: int, weight: CodedWeight, first: int, part: int) -> None:
        # One after the other: two outputs may share a byte.
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        self._library.checked(
            "fill_codes", self._program, number, codes.data_ptr(), scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(), first, weight.shape[0], part,
        )  # fmt: skip

    def _fill(self, unpacked: tuple[int, Tensor, int, int]) -> None:
        number, weight, first, part = unpacked
        source = weight.contiguous()
        if source.dtype not in TYPES:
            source = source.float()
        self._library.checked(
            "fill", self._program, number, source.data_ptr(), TYPES[source.dtype], first,
            source.shape[0], part,
        )  # fmt: skip

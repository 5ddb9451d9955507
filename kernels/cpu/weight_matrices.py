"""The weights of a program's linear layers, which the library copies into an order of its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from .coded_weight import CodedWeight
from .library import Library, Type
from .weights_file import NUM_EXPONENTS, MappedPart, MatrixForm, WeightsFile

__all__ = ["TYPES", "Weight", "WeightMatrices"]

TYPES = {torch.float32: Type.FLOAT, torch.bfloat16: Type.BF16}

UNIT_INPUTS, MOST_UNIT_INPUTS = 4, 1 << 19
"""Inputs of matrices with short exponents are a multiple of the first, and at most the second."""

COUNTED_TOGETHER = 1 << 22
"""Weights whose exponents one thread counts at a time."""

WEIGHTS_FOR_AN_EXCEPTION = 1000
"""With more exceptions, putting them right takes more than shorter reads save."""

Weight = Tensor | CodedWeight | MappedPart


class WeightMatrices:
    """See :meth:`.NativeProgram.matrix`.

    Args:
        library: the library.
        program: the handle of the program that they belong to, which lives longer.
        kind: in which activations are multiplied.
        packed: where they lie already; None: they are given.
        forms: of all matrices that will be added, if they are known; to find them out, all weights
            must be read. Not with ``packed``, which has them.

    Raises:
        ValueError: the file cannot be mapped, or has another size.
    """

    def __init__(
        self,
        library: Library,
        program: int,
        kind: Type,
        packed: WeightsFile | None,
        forms: Sequence[MatrixForm] | None = None,
    ) -> None:
        self._library = library
        self._program = program
        self._type = kind
        self._unpacked: list[tuple[int, Tensor, int, int]] = []
        self._is_packed = True
        self._known = forms if packed is None else packed.forms
        self._are_mapped = packed is not None
        self._forms: list[MatrixForm] = []
        if packed is not None:
            library.checked("map_weights", program, os.fsencode(packed.path))
            found = packed.path.stat().st_size
            if found != packed.num_bytes:
                raise ValueError(f"{packed.path} has {found} bytes, not {packed.num_bytes}")

    @property
    def forms(self) -> tuple[MatrixForm, ...]:
        """Of all matrices, in the order in which they were added."""
        return tuple(self._forms)

    @property
    def num_weights(self) -> int:
        """In all matrices."""
        return sum(form.num_weights for form in self._forms)

    def add(self, weights: Sequence[Weight], gated: bool) -> int:
        """The number of a new matrix; codes are copied now, full weights by :meth:`pack`.

        Raises:
            ValueError: the parts do not go together, or are not those that are known.
        """
        form = self._form(weights, gated) if self._known is None else self._next(weights, gated)
        number = self._make(form)
        self._forms.append(form)
        self._is_packed = False
        place = 0
        for part, weight in enumerate(weights):
            at = (0, part) if gated else (place, 0)
            if isinstance(weight, CodedWeight):
                self._fill_codes(number, weight, *at)
            elif isinstance(weight, Tensor):
                self._unpacked.append((number, weight.detach(), *at))
            place += weight.shape[0]
        return number

    def pack(self) -> None:
        """Copy all full weights that were added, by as many threads as torch computes with."""
        if self._is_packed:
            return
        unpacked, self._unpacked = self._unpacked, []
        parts = torch.get_num_threads()
        with ThreadPoolExecutor(parts) as threads:
            # Of one matrix by one thread: two outputs may share a byte.
            list(threads.map(self._fill, [[*of] for _, of in groupby(unpacked, itemgetter(0))]))
            self._library.checked("seal", self._program)
            list(threads.map(lambda part: self._fill_screen(part, parts), range(parts)))
        self._library.checked("choose_ways", self._program)
        self._is_packed = True

    def write(self, path: Path) -> WeightsFile:
        """Write all packed weights to a file.

        Raises:
            ValueError: it cannot be written; says why.
        """
        self.pack()
        size = ctypes.c_int64()
        self._library.checked("write_weights", self._program, os.fsencode(path), ctypes.byref(size))
        return WeightsFile(path, tuple(self._forms), size.value)

    def _next(self, weights: Sequence[Weight], gated: bool) -> MatrixForm:
        """The next of the known forms, which must be this one's."""
        assert self._known is not None
        number = len(self._forms)
        outputs, inputs = _shape(weights, gated)
        form = self._known[number] if number < len(self._known) else None
        if form is None or (form.outputs, form.inputs, form.gated) != (outputs, inputs, gated):
            raise ValueError(f"matrix {number} of {outputs} outputs is not known as such")
        if any(isinstance(weight, MappedPart) is not self._are_mapped for weight in weights):
            where = "lies" if self._are_mapped else "does not lie"
            raise ValueError(f"other weights for matrix {number}, which {where} in a file")
        return form

    def _form(self, weights: Sequence[Weight], gated: bool) -> MatrixForm:
        first = weights[0]
        outputs, inputs = _shape(weights, gated)
        if not isinstance(first, CodedWeight):
            full = [weight for weight in weights if isinstance(weight, Tensor)]
            if len(full) != len(weights):
                raise ValueError("only some parts of a matrix are weights in full")
            kind = self._kept_as(full)
            exponents, exceptions = self._short_exponents(full, kind)
            return MatrixForm(
                outputs, inputs, gated, kind, exponents=exponents, exceptions=exceptions
            )
        if not all(isinstance(w, CodedWeight) and w.goes_with(first) for w in weights):
            raise ValueError("the parts of a matrix are coded differently")
        values = None if first.values is None else tuple(first.values.tolist())
        return MatrixForm(
            outputs, inputs, gated, self._type, first.kind, first.group,
            first.offsets is not None, values,
        )  # fmt: skip

    def _make(self, form: MatrixForm) -> int:
        shape = self._program, form.outputs, form.inputs, form.kind, int(form.gated)
        if form.exponents is not None:
            return self._library.checked(
                "short_matrix", *shape, bytes(form.exponents), form.exceptions
            )
        if form.codes is None:
            return self._library.checked("matrix", *shape)
        values = None if form.values is None else (ctypes.c_float * 16)(*form.values)
        return self._library.checked(
            "coded_matrix", *shape, form.codes, form.group, int(form.has_offsets), values
        )

    def _kept_as(self, weights: Sequence[Tensor]) -> Type:
        """Floats of a bfloat16 checkpoint stay in 16 bits: the same results for half the reads."""
        if self._type is Type.FLOAT and all(self._fits_bf16(w) for w in weights):
            return Type.WIDENED
        return self._type

    def _short_exponents(
        self, weights: Sequence[Tensor], kind: Type
    ) -> tuple[tuple[int, ...] | None, int]:
        """The exponents that few weights do not have, and how many those are; None: too many."""
        inputs = weights[0].shape[1]
        in_units = inputs % UNIT_INPUTS == 0 and inputs <= MOST_UNIT_INPUTS
        if kind is Type.FLOAT or not in_units or not self._library.has_short_exponents():
            return None, 0
        parts = [part for weight in weights for part in _slices(weight)]
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            counts = [sum(column) for column in zip(*threads.map(self._count, parts), strict=True)]
        usual = sorted(range(len(counts)), key=lambda exponent: -counts[exponent])[:NUM_EXPONENTS]
        exceptions = sum(counts) - sum(counts[exponent] for exponent in usual)
        if exceptions * WEIGHTS_FOR_AN_EXCEPTION > sum(counts):
            return None, 0
        return tuple(usual), exceptions

    def _count(self, weight: Tensor) -> list[int]:
        """How many weights have each of the 128 upper seven bits of an exponent."""
        counts, source = (ctypes.c_int64 * 128)(), _plain(weight)
        self._library.count_exponents(
            source.data_ptr(), TYPES[source.dtype], source.numel(), counts
        )
        return list(counts)

    def _fits_bf16(self, weight: Tensor) -> bool:
        source = _plain(weight).float()
        return bool(self._library.fits_bf16(source.data_ptr(), source.numel()))

    def _fill_codes(self, number: int, weight: CodedWeight, first: int, part: int) -> None:
        # One after the other: two outputs may share a byte.
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        self._library.checked(
            "fill_codes", self._program, number, codes.data_ptr(), scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(), first, weight.shape[0], part,
        )  # fmt: skip

    def _fill_screen(self, part: int, parts: int) -> None:
        self._library.checked("fill_screen", self._program, part, parts)

    def _fill(self, parts: Sequence[tuple[int, Tensor, int, int]]) -> None:
        for number, weight, first, part in parts:
            source = _plain(weight)
            self._library.checked(
                "fill", self._program, number, source.data_ptr(), TYPES[source.dtype], first,
                source.shape[0], part,
            )  # fmt: skip


def _slices(weight: Tensor) -> tuple[Tensor, ...]:
    """Rows of it, as many as one thread looks at together."""
    rows = max(1, COUNTED_TOGETHER // weight.shape[1])
    return tuple(weight[begin : begin + rows] for begin in range(0, weight.shape[0], rows))


def _plain(weight: Tensor) -> Tensor:
    """The weight as the library reads it."""
    weight = weight.detach().contiguous()
    return weight if weight.dtype in TYPES else weight.float()


def _shape(weights: Sequence[Weight], gated: bool) -> tuple[int, int]:
    """Outputs, after gating, and inputs of a matrix of these weights."""
    outputs = weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights)
    return outputs, weights[0].shape[1]

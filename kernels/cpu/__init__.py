"""A whole step of a decoder on the CPU, in one call of a library of our own.

The C++ sources in ``src/`` are compiled at first use, for the machine's best instruction set. Where
that fails, :func:`load_library` says why; everything has another path in torch.
"""

from __future__ import annotations

from .coded_weight import CodedWeight
from .compiler import NativeUnavailable, supported_sets
from .library import Activation, Codes, Library, Type, load_library
from .operands import Cache, Clamp, Draws, HeadShape, NormWeights, Rotary
from .packed_weights import MatrixForm, PackedPart, PackedWeights
from .step_program import LOGITS, NativeProgram
from .thread_pool import ThreadPool

__all__ = [
    "LOGITS", "Activation", "Cache", "Clamp", "CodedWeight", "Codes", "Draws", "HeadShape",
    "Library", "MatrixForm", "NativeProgram", "NativeUnavailable", "NormWeights", "PackedPart",
    "PackedWeights", "Rotary", "ThreadPool", "Type", "load_library", "supported_sets",
]  # fmt: skip

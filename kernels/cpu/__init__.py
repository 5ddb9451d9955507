"""A whole step of a decoder on the CPU, in one call of a library of our own.

The C++ sources in ``src/`` are compiled at first use, for the machine's best instruction set. Where
that fails, :func:`load_library` says why; everything has another path in torch.
"""

from __future__ import annotations

from .coded_weight import CodedWeight
from .compiler import NativeUnavailable, supported_sets
from .library import Activation, Codes, Library, Type, load_library
from .operands import BoundStep, Cache, Clamp, Draws, HeadShape, NormWeights, Rotary
from .step_program import LOGITS, NativeProgram
from .thread_pool import ThreadPool
from .weights_file import MappedPart, MatrixForm, WeightsFile

__all__ = [
    "LOGITS",
    "Activation",
    "BoundStep",
    "Cache",
    "Clamp",
    "CodedWeight",
    "Codes",
    "Draws",
    "HeadShape",
    "Library",
    "MappedPart",
    "MatrixForm",
    "NativeProgram",
    "NativeUnavailable",
    "NormWeights",
    "Rotary",
    "ThreadPool",
    "Type",
    "WeightsFile",
    "load_library",
    "supported_sets",
]  # fmt: skip

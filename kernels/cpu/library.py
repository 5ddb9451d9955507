"""The native library's C interface: structures and functions of ``src/program/api*.cpp``."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

from .compiler import NativeUnavailable, build, supported_sets

__all__ = [
    "Activation", "AttendSpec", "Codes", "DrawInput", "Error", "KVKind", "Library", "LinearSpec",
    "LogitsInput", "MaskInput", "NormSpec", "ReportInput", "RotateSpec", "RowKind", "StepInput",
    "Type", "load_library",
]  # fmt: skip


class Type(IntEnum):
    """Of weights, activations and cached keys and values.

    SPLIT is of activations alone, INT8 of the cache, WIDENED of weights: floats kept in bfloat16.
    """

    FLOAT = 0
    BF16 = 1
    SPLIT = 2
    INT8 = 3
    WIDENED = 4


class RowKind(IntEnum):
    """Which rows a buffer has."""

    TOKENS = 0
    OUTPUTS = 1


class Activation(IntEnum):
    """What an MLP applies to its gate, or between its layers."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU_ERF = 3
    RELU = 4
    CLAMPED_SWIGLU = 5


class Codes(IntEnum):
    """What the codes of a weight are."""

    TABLE4 = 1
    INT4 = 2
    INT8 = 3
    FP8 = 4


class Error(ctypes.Structure):
    """Where a call that fails says why."""

    _fields_: ClassVar = [("text", c_char * 256)]


class NormSpec(ctypes.Structure):
    """``count`` norms of ``columns`` each, side by side."""

    _fields_: ClassVar = [
        ("columns", c_int64), ("count", c_int64), ("weight", c_void_p), ("bias", c_void_p),
        ("epsilon", c_float), ("centred", c_int32),
    ]  # fmt: skip


class LinearSpec(ctypes.Structure):
    """A linear layer and its epilogue."""

    _fields_: ClassVar = [
        ("matrix", c_int32), ("input", c_int32), ("output", c_int32), ("activation", c_int32),
        ("scale", c_float), ("softcap", c_float), ("slope", c_float), ("limit", c_float),
        ("add", c_int32), ("screened", c_int32), ("bias", c_void_p),
    ]  # fmt: skip


class RotateSpec(ctypes.Structure):
    """Head norms, rotary positions and the write of keys and values to the cache."""

    _fields_: ClassVar = [
        ("buffer", c_int32), ("interleaved", c_int32), ("heads", c_int64), ("kv_heads", c_int64),
        ("key_dim", c_int64), ("value_dim", c_int64), ("layer", c_int64),
        ("rotary_dims", c_int64), ("positions", c_int64), ("cosines", c_void_p),
        ("sines", c_void_p), ("query_norm", NormSpec), ("key_norm", NormSpec),
    ]  # fmt: skip


class AttendSpec(ctypes.Structure):
    """Attention of one layer."""

    _fields_: ClassVar = [
        ("input", c_int32), ("output", c_int32), ("heads", c_int64), ("kv_heads", c_int64),
        ("key_dim", c_int64), ("value_dim", c_int64), ("layer", c_int64), ("window", c_int64),
        ("scale", c_float), ("softcap", c_float), ("sinks", c_void_p),
    ]  # fmt: skip


class KVKind(ctypes.Structure):
    """One KV kind's slots and block tables in a step."""

    _fields_: ClassVar = [
        ("slots", c_void_p), ("tables", c_void_p), ("table_width", c_int64),
        ("num_blocks", c_int64),
    ]  # fmt: skip


class StepInput(ctypes.Structure):
    """What one step computes; see ``src/program/step.h``."""

    _fields_: ClassVar = [
        ("rows", c_int64), ("sequences", c_int64), ("outputs", c_int64), ("kinds", c_int64),
        ("layers", c_int64), ("block_size", c_int64), ("tokens", c_void_p),
        ("positions", c_void_p), ("query_starts", c_void_p), ("context_lens", c_void_p),
        ("output_rows", c_void_p), ("kv", POINTER(KVKind)), ("layer_kinds", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("logits", c_void_p), ("largest", c_void_p),
        ("places", c_void_p), ("largest_only", c_int64),
    ]  # fmt: skip


class LogitsInput(ctypes.Structure):
    """Rows of logits; see ``src/rows/scores.h``."""

    _fields_: ClassVar = [
        ("values", c_void_p), ("rows", c_int64), ("columns", c_int64), ("stride", c_int64),
        ("largest", c_void_p),
    ]  # fmt: skip


class DrawInput(ctypes.Structure):
    """How tokens are drawn; see ``src/rows/draw.h``."""

    _fields_: ClassVar = [
        ("count", c_int64), ("rows", c_void_p), ("temperature", c_void_p), ("seeds", c_void_p),
        ("choices", c_void_p), ("indexes", c_void_p), ("stream", c_int64), ("top_k", c_void_p),
        ("top_p", c_void_p), ("log_min_p", c_void_p),
    ]  # fmt: skip


class MaskInput(ctypes.Structure):
    """Which tokens of which rows are forbidden; see ``src/rows/forbid.h``."""

    _fields_: ClassVar = [
        ("values", c_void_p), ("rows", c_int64), ("columns", c_int64), ("stride", c_int64),
        ("count", c_int64), ("which", c_void_p), ("masks", c_void_p), ("words", c_int64),
    ]  # fmt: skip


class ReportInput(ctypes.Structure):
    """Whose log-probabilities are wanted; see ``src/rows/logprobs.h``."""

    _fields_: ClassVar = [
        ("count", c_int64), ("rows", c_void_p), ("tokens", c_void_p), ("width", c_int64),
    ]  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "instruction_set": (c_char_p, []),
    "activation_type": (c_int32, [c_int32]),
    "pool_create": (c_void_p, [c_int32, c_int32, c_int32]),
    "pool_destroy": (None, [c_void_p]),
    "create": (c_void_p, [c_int32]),
    "destroy": (None, [c_void_p]),
    "cache_type": (c_int32, [c_void_p, c_int32, POINTER(Error)]),
    "buffer": (c_int32, [c_void_p, c_int64, c_int32, c_int32, c_int64, POINTER(Error)]),
    "matrix": (c_int32, [c_void_p, c_int64, c_int64, c_int32, c_int32, POINTER(Error)]),
    "fill": (
        c_int32,
        [c_void_p, c_int32, c_void_p, c_int32, c_int64, c_int64, c_int32, POINTER(Error)],
    ),
    "coded_matrix": (
        c_int32,
        [
            c_void_p,
            c_int64,
            c_int64,
            c_int32,
            c_int32,
            c_int32,
            c_int64,
            c_int32,
            c_void_p,
            POINTER(Error),
        ],
    ),
    "fill_codes": (
        c_int32,
        [
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int32,
            POINTER(Error),
        ],
    ),
    "map_weights": (c_int32, [c_void_p, c_char_p, POINTER(Error)]),
    "write_weights": (c_int32, [c_void_p, c_char_p, POINTER(c_int64), POINTER(Error)]),
    "short_matrix": (
        c_int32,
        [
            c_void_p,
            c_int64,
            c_int64,
            c_int32,
            c_int32,
            c_char_p,
            c_int64,
            POINTER(Error),
        ],
    ),
    "seal": (c_int32, [c_void_p, POINTER(Error)]),
    "has_short_exponents": (c_int32, []),
    "count_exponents": (None, [c_void_p, c_int32, c_int64, c_void_p]),
    "fits_bf16": (c_int32, [c_void_p, c_int64]),
    "input_type": (c_int32, [c_void_p, c_int32, POINTER(Error)]),
    "weight_bytes": (c_int64, [c_void_p]),
    "choose_ways": (c_int32, [c_void_p, POINTER(Error)]),
    "embed": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_float, c_int32, POINTER(Error)],
    ),
    "norm": (
        c_int32,
        [c_void_p, POINTER(NormSpec), c_int32, c_int32, c_int32, c_int32, c_float, POINTER(Error)],
    ),
    "linear": (c_int32, [c_void_p, POINTER(LinearSpec), c_int32, POINTER(Error)]),
    "fill_screen": (c_int32, [c_void_p, c_int64, c_int64, POINTER(Error)]),
    "rotate": (c_int32, [c_void_p, POINTER(RotateSpec), POINTER(Error)]),
    "attend": (c_int32, [c_void_p, POINTER(AttendSpec), POINTER(Error)]),
    "copy": (c_int32, [c_void_p, c_int32, c_int32, POINTER(Error)]),
    "route": (c_int32, [c_void_p, c_int32, c_int64, c_int64, c_int32, POINTER(Error)]),
    "gather": (c_int32, [c_void_p, c_int32, c_int32, POINTER(Error)]),
    "experts": (c_int32, [c_void_p, POINTER(LinearSpec), c_int64, c_int32, POINTER(Error)]),
    "combine": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_float, POINTER(Error)]),
    "start": (c_int32, [c_void_p, c_void_p, POINTER(StepInput), POINTER(Error)]),
    "finish": (None, [c_void_p, c_void_p]),
    "largest": (
        c_int32,
        [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, POINTER(Error)],
    ),
    "draw": (
        c_int32,
        [c_void_p, POINTER(LogitsInput), POINTER(DrawInput), c_void_p, POINTER(Error)],
    ),
    "forbid": (c_int32, [c_void_p, POINTER(MaskInput), POINTER(Error)]),
    "logprobs": (
        c_int32,
        [
            c_void_p,
            POINTER(LogitsInput),
            POINTER(ReportInput),
            c_void_p,
            c_void_p,
            c_void_p,
            POINTER(Error),
        ],
    ),
    "op_kinds": (c_int32, []),
    "times": (None, [c_void_p, c_void_p]),
}


class Library:
    """The functions of a built library, without their prefix: ``library.start`` and so on.

    Calls hold no interpreter lock.

    Args:
        path: of the shared object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self._handle, f"penstock_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"the native library does not load: {error}") from error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """The instruction set it was built for."""
        return str(self.instruction_set().decode())

    def checked(self, name: str, *arguments: Any) -> int:
        """Call a function that can fail.

        Raises:
            ValueError: it did; the text is the library's.
        """
        error = Error()
        result: int = getattr(self, name)(*arguments, ctypes.byref(error))
        if result < 0:
            raise ValueError(error.text.decode())
        return result


def load_library(instruction_set: str | None = None) -> Library:
    """The native library, built if need be.

    Args:
        instruction_set: one of :func:`supported_sets`; None: the best of them.

    Raises:
        NativeUnavailable: it cannot be had here; says why.
    """
    have = supported_sets()
    wanted = have[0] if instruction_set is None else instruction_set
    if wanted not in have:
        raise NativeUnavailable(f"this CPU has {', '.join(have)}, but not {wanted}")
    return Library(build(wanted))

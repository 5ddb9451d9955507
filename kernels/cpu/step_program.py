"""A flat program of the native library: buffers, weights and operations, built once, then run."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .library import (
    Activation,
    AttendSpec,
    Error,
    Library,
    LinearSpec,
    RotateSpec,
    RowKind,
    Type,
)
from .operands import (
    BoundStep,
    Cache,
    Clamp,
    HeadShape,
    NormWeights,
    Rotary,
    address_of,
    norm_spec,
)
from .thread_pool import ThreadPool
from .weight_matrices import TYPES, Weight, WeightMatrices
from .weights_file import MatrixForm, WeightsFile

__all__ = ["LOGITS", "NativeProgram"]

LOGITS = -1
"""A destination: the step's logits."""

OP_NAMES = (
    "embedding", "norm", "linear", "rotary", "attention", "copy", "routing", "gathering", "experts",
    "combination", "screen",
)  # fmt: skip


class NativeProgram:
    """Operations on buffers, in the order in which they were added.

    A buffer's rows are the step's tokens, or the tokens whose logits are wanted. Tensors that are
    handed over are copied, but for the embedding and the rotary tables, which are kept.

    Args:
        library: the library.
        dtype: float32 or bfloat16, of the weights and of the cache.
        packed: a file with its packed weights; matrices are made of :class:`MappedPart` then.
        forms: of its matrices, if they are known from another program of the same weights; that
            saves reading these once.

    Attributes:
        has_screen: whether steps can find the largest logits without computing all.

    Raises:
        ValueError: (all methods) an operation does not fit its buffers.
    """

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        packed: WeightsFile | None = None,
        forms: Sequence[MatrixForm] | None = None,
    ) -> None:
        self._library = library
        self._type = TYPES[dtype]
        self.dtype = dtype
        self._cache_dtype = dtype
        self._handle = library.create(self._type)
        if not self._handle:
            raise MemoryError("no memory for a program")
        weakref.finalize(self, library.destroy, self._handle)
        self.multiplied = Type(library.activation_type(self._type))
        self.has_screen = False
        self._kept: list[Any] = []
        self._mapped_bytes = 0 if packed is None else packed.num_bytes
        self._weights = WeightMatrices(library, self._handle, self._type, packed, forms)
        self._types: list[Type] = []
        self._error = Error()

    # ---- building

    @property
    def forms(self) -> tuple[MatrixForm, ...]:
        """Of its matrices, as another program of the same weights takes them."""
        return self._weights.forms

    def buffer(
        self, columns: int, *, multiplied: bool = False, kind: Type | None = None,
        outputs: bool = False, copies: int = 1,
    ) -> int:  # fmt: skip
        """A new buffer's number.

        Args:
            columns: of a row.
            multiplied: whether linear layers read it: then it has the type they want, unless their
                weights are coded.
            kind: its type; None: that, or else floats.
            outputs: whether its rows are the wanted ones alone.
            copies: of each row; as many as a row has experts, if they compute it.
        """
        if kind is None:
            kind = self.multiplied if multiplied else Type.FLOAT
        rows = RowKind.OUTPUTS if outputs else RowKind.TOKENS
        number = self._library.checked("buffer", self._handle, columns, kind, rows, copies)
        self._types.append(kind)
        return number

    def matrix(self, *weights: Weight, gated: bool = False) -> int:
        """Weights ``[out, in]``, one after the other; returns the matrix's number.

        Full ones must not change before :meth:`pack`, which the first :meth:`run` calls, too.

        Args:
            weights: all float32 or bfloat16, or all coded alike; of a gated layer the gate first.
            gated: whether the output is ``activation(gate(x)) * up(x)``.
        """
        return self._weights.add(weights, gated)

    def input_type(self, matrix: int) -> Type:
        """The type of the rows that are multiplied with that matrix."""
        return Type(self._library.checked("input_type", self._handle, matrix))

    @property
    def num_weights(self) -> int:
        """In all matrices, those of experts that a step does not choose included."""
        return self._weights.num_weights

    @property
    def weight_bytes(self) -> int:
        """Memory of all packed weights, with their scales and without a screen."""
        return int(self._library.weight_bytes(self._handle))

    @property
    def mapped_bytes(self) -> int:
        """Of these, what lies in a file that processes share."""
        return self._mapped_bytes

    def pack(self) -> None:
        """Copy the weights of all matrices, by as many threads as torch computes with."""
        self._weights.pack()

    def write_weights(self, path: Path) -> WeightsFile:
        """Write all packed weights to a file, from which another program can be made."""
        return self._weights.write(path)

    def embed(self, table: Tensor, output: int, *, scale: float = 1.0) -> None:
        """Row ``token`` of ``table`` ``[vocabulary, columns]``, times ``scale``."""
        table = table.detach().contiguous()
        self._kept.append(table)
        vocabulary, columns = table.shape
        self._library.checked(
            "embed", self._handle, table.data_ptr(), TYPES[table.dtype], vocabulary, columns,
            scale, output,
        )  # fmt: skip

    def norm(
        self, weights: NormWeights, source: int, output: int, *, add: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Normalise ``source``; with ``add``, the output grows by ``scale`` times that."""
        kept: list[Tensor] = []
        spec = norm_spec(weights, kept)
        self._library.checked(
            "norm", self._handle, ctypes.byref(spec), source, output, self._types[output],
            int(add), scale,
        )  # fmt: skip

    def linear(
        self,
        matrix: int,
        source: int,
        output: int,
        *,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
        add: bool = False,
        scale: float = 1.0,
        softcap: float = 0.0,
        screened: bool = False,
    ) -> None:
        """``y = softcapped(scale * activation(matrix @ x + bias))``, stored or added.

        Args:
            matrix: from :meth:`matrix`; of a gated one ``y = scale * activation(gate) * up``.
            source: a buffer that is multiplied.
            output: a buffer, or :data:`LOGITS`.
            bias: ``[outputs]``; of a gated layer the gate's, then the other's.
            activation: of the output, or of the gate.
            add: to what the output holds.
            scale: factor.
            softcap: ``y = softcap * tanh(y / softcap)`` if it is not 0.
            screened: of logits: make a screen if the CPU and the matrix are fit for one, and set
                :attr:`has_screen`. It is a copy of the matrix in 8 bits. Steps that want the
                largest logits alone learn from it which few they must compute.
        """
        values = None if bias is None else bias.detach().float().contiguous()
        spec = LinearSpec(
            matrix, source, output, activation, scale, softcap, 1.0, 0.0, int(add),
            int(screened), address_of(values),
        )  # fmt: skip
        kind = Type.FLOAT if output == LOGITS else self._types[output]
        self.has_screen |= bool(
            self._library.checked("linear", self._handle, ctypes.byref(spec), kind)
        )

    def route(self, source: int, experts: int, chosen: int, *, normalised: bool) -> None:
        """Choose each row's experts: those with the largest of its ``experts`` numbers.

        The next operations on experts are about this choice. Of equal numbers the first counts.

        Args:
            source: the router's outputs, floats.
            experts: how many there are.
            chosen: by how many each row is computed.
            normalised: whether their weights are a softmax over the chosen, or over all.
        """
        self._library.checked("route", self._handle, source, experts, chosen, int(normalised))

    def gather(self, source: int, output: int) -> None:
        """Each row once for each of its experts, in the order of the experts."""
        self._library.checked("gather", self._handle, source, output)

    def experts(
        self,
        matrices: Sequence[int],
        source: int,
        output: int,
        *,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
        clamp: Clamp | None = None,
    ) -> None:
        """A linear layer of each expert over its gathered rows; see :meth:`linear`.

        Args:
            matrices: of all experts, in their order, made one after the other.
            source: a buffer of gathered rows.
            output: a buffer of as many.
            bias: ``[experts, outputs]``; of gated layers the gate's outputs, then the others.
            activation: of the output, or of the gate.
            clamp: of ``Activation.CLAMPED_SWIGLU``.
        """
        if list(matrices) != list(range(matrices[0], matrices[0] + len(matrices))):
            raise ValueError("the matrices of experts follow one another")
        values = None if bias is None else bias.detach().float().contiguous()
        clamp = clamp or Clamp(1.0, 0.0)
        spec = LinearSpec(
            matrices[0], source, output, activation, 1.0, 0.0, clamp.slope, clamp.limit, 0, 0,
            address_of(values),
        )  # fmt: skip
        self._library.checked(
            "experts", self._handle, ctypes.byref(spec), len(matrices), self._types[output]
        )

    def combine(self, source: int, output: int, *, add: bool = False, scale: float = 1.0) -> None:
        """Of each row, ``scale`` times the sum of its experts' outputs by weight; floats.

        Args:
            source: a buffer of gathered rows.
            output: a buffer of rows.
            add: to what the output holds.
            scale: factor.
        """
        self._library.checked("combine", self._handle, source, output, int(add), scale)

    def rotate(
        self,
        source: int,
        shape: HeadShape,
        layer: int,
        *,
        rotary: Rotary | None = None,
        query_norm: NormWeights | None = None,
        key_norm: NormWeights | None = None,
    ) -> None:
        """Norm and turn queries and keys in place, and store keys and values in the cache."""
        kept: list[Tensor] = []
        spec = RotateSpec(
            source, 0, shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, layer
        )
        if rotary is not None:
            tables = [t.float().contiguous() for t in (rotary.cosines, rotary.sines)]
            self._kept += tables
            spec.positions, half = tables[0].shape
            spec.rotary_dims, spec.interleaved = 2 * half, int(rotary.interleaved)
            spec.cosines, spec.sines = (t.data_ptr() for t in tables)
        if query_norm is not None:
            spec.query_norm = norm_spec(query_norm, kept)
        if key_norm is not None:
            spec.key_norm = norm_spec(key_norm, kept)
        self._library.checked("rotate", self._handle, ctypes.byref(spec))

    def attend(
        self,
        source: int,
        output: int,
        shape: HeadShape,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attention; see :func:`penstock.kernels.paged_attention` for the formula."""
        values = None if sinks is None else sinks.detach().float().contiguous()
        spec = AttendSpec(
            source, output, shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, layer,
            window or 0, scale, softcap or 0.0, address_of(values),
        )  # fmt: skip
        self._library.checked("attend", self._handle, ctypes.byref(spec))

    def copy(self, source: int, output: int) -> None:
        """The rows of ``source``, or the wanted ones alone, as the output's rows and type are."""
        self._library.checked("copy", self._handle, source, output)

    # ---- running

    def keep_cache_in_int8(self) -> None:
        """Store keys and values in 8 bits from now on; caches bound before are of no use."""
        self._library.checked("cache_type", self._handle, Type.INT8)
        self._cache_dtype = torch.int8

    def bind(self, layers: Sequence[tuple[Tensor, Tensor]], layer_kinds: Sequence[int]) -> Cache:
        """Make a cache ready for steps.

        Args:
            layers: keys and values of each layer, in the layout ``GROUPS`` of
                ``penstock.kernels.kv_layout.KVLayout``, or in ``GROUPS_INT8``.
            layer_kinds: the KV kind of each layer.
        """
        for tensor in (tensor for pair in layers for tensor in pair):
            if tensor.dtype != self._cache_dtype or not tensor.is_contiguous():
                raise ValueError(f"a cache of {tensor.dtype}, where {self._cache_dtype} is stored")
        count = len(layers)
        keys, values = (
            (ctypes.c_void_p * count)(*(pair[i].data_ptr() for pair in layers)) for i in (0, 1)
        )
        blocks = dict(zip(layer_kinds, (key.shape[0] for key, _ in layers), strict=True))
        # A kind that no layer belongs to has no blocks that could be missed.
        num_blocks = tuple(blocks.get(k, 1 << 32) for k in range(max(blocks, default=0) + 1))
        kinds = (ctypes.c_int32 * count)(*layer_kinds)
        return Cache(tuple(layers), keys, values, kinds, num_blocks)

    def run(
        self, pool: ThreadPool, step: BoundStep, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Compute one step: store its keys and values, and the logits of the wanted rows.

        Args:
            pool: the threads.
            step: what to compute.
            meanwhile: called once, while the pool's other threads compute. It must not use them.

        Raises:
            ValueError: the step asks for a token, position or block that there is not.
        """
        self.pack()
        if self._library.start(self._handle, pool.handle, step.input, self._error) < 0:
            raise ValueError(self._error.text.decode())
        try:
            if meanwhile is not None:
                meanwhile()
        finally:  # whatever happened: all that the step reads and writes must outlive it
            self._library.finish(self._handle, pool.handle)

    def take_times(self) -> dict[str, float]:
        """Seconds spent in each kind of operation since the last call."""
        times = array("q", bytes(8 * self._library.op_kinds()))
        self._library.times(self._handle, times.buffer_info()[0])
        return {name: ns / 1e9 for name, ns in zip(OP_NAMES, times, strict=True)}

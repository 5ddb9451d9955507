"""What the operations of a flat program work on, beside buffers and weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ragged import RaggedBatch
from .library import KVKind, NormSpec, StepInput

__all__ = [
    "BoundStep", "Cache", "Clamp", "Draws", "HeadShape", "NormWeights", "Rotary", "address_of",
    "norm_spec",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NormWeights:
    """RMSNorm, or LayerNorm if ``centred``.

    Attributes:
        columns: numbers that are normalised together.
        epsilon: added to their mean square.
        weight: ``[columns]`` or ``[count, columns]``; None: ones.
        bias: of the same shape; None: zeros.
        centred: the mean is taken off first.
    """

    columns: int
    epsilon: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions.

    Attributes:
        cosines: float32 ``[positions, dims / 2]``, contiguous.
        sines: of the same shape.
        interleaved: pairs are neighbours (``2i, 2i + 1``); else ``i, i + dims / 2``.
    """

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Clamp:
    """Of a clamped SwiGLU: ``(up + 1) * gate * sigmoid(slope * gate)``.

    Attributes:
        slope: factor within the sigmoid.
        limit: ``gate`` is at most that, ``up`` between it and its negative.
    """

    slope: float
    limit: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Of the heads of one attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def columns(self) -> int:
        """Of a row that holds queries, keys and values."""
        return (self.heads + self.kv_heads) * self.key_dim + self.kv_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Draws:
    """How tokens are drawn from ``R`` rows of logits.

    Attributes:
        rows: int64 ``[R]``, which rows.
        temperature: float32 ``[R]``, positive.
        seeds: int64 ``[R]``, of the requests.
        choices: int64 ``[R]``, which of a request's outputs.
        indexes: int64 ``[R]``, of the token in its output.
        stream: which of a token's streams of random numbers.
        top_k: int64 ``[R]``, 0 for all; None, as is ``top_p``, if every row is drawn from its whole
            vocabulary.
        top_p: float64 ``[R]``, 1 for all.
        log_min_p: float32 ``[R]``, -inf for all; None with ``top_k``, or if every row keeps all.
    """

    rows: Tensor
    temperature: Tensor
    seeds: Tensor
    choices: Tensor
    indexes: Tensor
    stream: int
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    log_min_p: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of all layers, with their addresses; from :meth:`NativeProgram.bind`."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    keys: Any
    values: Any
    kinds: Any
    num_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A step as the library takes it.

    Attributes:
        input: the addresses of what it reads and writes.
        held: the tensors and the cache at these addresses, kept alive.
    """

    input: StepInput
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        output_rows: Tensor,
        batches: Sequence[RaggedBatch],
        cache: Cache,
        logits: Tensor,
        largest: tuple[Tensor, Tensor] | None = None,
        *,
        largest_only: bool = False,
    ) -> BoundStep:
        """Bind a step, while another one may be running.

        Args:
            tokens: ``T`` int64, contiguous, in any shape. They are read when the step runs.
            output_rows: int64, of which the first ``R`` are the tokens whose logits are wanted.
            batches: one for each KV kind: the same tokens, with that kind's tables.
            cache: where keys and values are.
            logits: float32 ``[R, vocabulary]``, contiguous: written.
            largest: float32 ``[R]`` and int64 ``[R]``: gets what :meth:`ThreadPool.largest` finds
                in the logits; or None.
            largest_only: whether ``logits`` may be left as they are, or partly computed.
        """
        first = batches[0]
        kinds = (KVKind * len(batches))()
        for kind, batch, num_blocks in zip(kinds, batches, cache.num_blocks, strict=False):
            kind.slots = batch.slots.data_ptr()
            kind.tables = batch.host_block_tables.data_ptr()
            kind.table_width = batch.host_block_tables.shape[1]
            kind.num_blocks = num_blocks
        step = StepInput(
            first.num_tokens, first.num_sequences, logits.shape[0], len(cache.num_blocks),
            len(cache.layers), first.block_size, tokens.data_ptr(),
            first.host_positions.data_ptr(), first.query_starts.data_ptr(),
            first.context_lens.data_ptr(), output_rows.data_ptr(), kinds,
            ctypes.addressof(cache.kinds), ctypes.addressof(cache.keys),
            ctypes.addressof(cache.values), logits.data_ptr(),
            *((t.data_ptr() for t in largest) if largest else (None, None)), int(largest_only),
        )  # fmt: skip
        return cls(step, (tokens, output_rows, tuple(batches), cache, logits, largest))


def norm_spec(norm: NormWeights, kept: list[Tensor]) -> NormSpec:
    """The norm as the library takes it; ``kept`` gets the tensors that it points to."""
    found = []
    for tensor in (norm.weight, norm.bias):
        values = None if tensor is None else tensor.detach().float().contiguous()
        if values is not None:
            kept.append(values)
        found.append(values)
    sizes = [values.numel() // norm.columns for values in found if values is not None]
    return NormSpec(
        norm.columns, sizes[0] if sizes else 1, *map(address_of, found), norm.epsilon,
        int(norm.centred),
    )  # fmt: skip


def address_of(tensor: Tensor | None) -> int | None:
    """The address of the tensor's data; None where there is no tensor."""
    return None if tensor is None else tensor.data_ptr()

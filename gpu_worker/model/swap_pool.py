"""Host memory for the KV of preempted sequences, and the copies between it and the KV pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from penstock.shared.errors import InsufficientMemory

from .kv_pool import KVPool, LayerPool
from .memory import format_bytes

if TYPE_CHECKING:
    from ..engine.plan import BlockCopy

__all__ = ["SwapPool"]

_STAGE_BYTES = 64 << 20
"""Of each of the two buffers through which a GPU's blocks pass. A step that copies out no more than
both hold waits for no copy."""


class SwapPool:
    """Blocks of host memory; which sequence owns which is the engine's business.

    One row of memory holds one block of the device, of all layers, so that a block crosses the bus
    as one copy. Next to a GPU the memory is pinned.

    Args:
        pool: whose blocks are kept here.
        num_blocks: rows, at least 1.

    Raises:
        InsufficientMemory: the host cannot give the memory.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        shape = (num_blocks, pool.geometry.elements_per_token * pool.block_size)
        on_gpu = pool.device.type == "cuda"
        try:
            rows = torch.empty(shape, dtype=pool.dtype, pin_memory=on_gpu)
        except (MemoryError, RuntimeError) as error:
            size = format_bytes(num_blocks * pool.bytes_per_block)
            raise InsufficientMemory(
                f"the host cannot give {size} for {num_blocks} blocks of swapped KV; "
                "lower engine.swap_memory, or set it to 0 for no swapping"
            ) from error
        self._side = _Streamed(pool, rows) if on_gpu else _Direct(pool, rows)

    def swap(self, out: Sequence[BlockCopy], back: Sequence[BlockCopy]) -> None:
        """Copy blocks to the host, then blocks from the host.

        On a GPU this only queues work: what is queued on the current stream afterwards finds the
        copies made, and may write the blocks that were copied out.
        """
        if out or back:
            self._side.swap(out, back)

    def take_seconds(self) -> float | None:
        """For how long the device did nothing else in the last :meth:`swap`, once.

        Call it when the step has been waited for. None if there was no swap since the last call.
        """
        return self._side.take_seconds()


class _Direct:
    """Device memory is host memory: copies are made at once."""

    def __init__(self, pool: KVPool, rows: Tensor) -> None:
        self._layers, self._kept = _stored(pool), _cut(pool, rows)
        self._seconds: float | None = None

    def swap(self, out: Sequence[BlockCopy], back: Sequence[BlockCopy]) -> None:
        began = time.perf_counter()
        for copies, outwards in ((out, True), (back, False)):
            if not copies:
                continue
            sources = torch.tensor([copy.source for copy in copies])
            targets = torch.tensor([copy.target for copy in copies])
            for layer, kept in zip(self._layers, self._kept, strict=True):
                source, target = (layer, kept) if outwards else (kept, layer)
                target.key[targets] = source.key[sources]
                target.value[targets] = source.value[sources]
        self._seconds = time.perf_counter() - began

    def take_seconds(self) -> float | None:
        seconds, self._seconds = self._seconds, None
        return seconds


class _Streamed:
    """Copies between a GPU and pinned memory, on a stream of their own.

    Blocks lie scattered over the layers' tensors, so they are gathered into a staging buffer first,
    at the speed of device memory and on the compute stream. From then on their places may be
    overwritten, and the slow way over the bus runs beside the forward pass. On the way back the
    bus comes first and the compute stream waits for it, since the forward reads these blocks.

    Who waits for whom:

    - a buffer is used again only after ``free``, recorded by whoever used it last;
    - rows of the host are touched on the copy stream alone, so in the order in which it was asked.
    """

    def __init__(self, pool: KVPool, rows: Tensor) -> None:
        self._device, self._rows = pool.device, rows
        self._layers = _stored(pool)
        self._stream: torch.cuda.Stream = cast(Any, torch.cuda.Stream)(pool.device)
        size = max(1, min(len(rows), _STAGE_BYTES // pool.bytes_per_block))
        self._size = size
        self._stages = [_Stage(pool, size) for _ in range(2)]
        self._turn = 0
        self._timed: tuple[Any, Any] | None = None

    def swap(self, out: Sequence[BlockCopy], back: Sequence[BlockCopy]) -> None:
        current, new_event = torch.cuda.current_stream(self._device), cast(Any, torch.cuda.Event)
        began, ended = (new_event(enable_timing=True) for _ in range(2))
        current.record_event(began)
        for part in _parts(out, self._size):
            self._copy_out(part, current)
        for part in _parts(back, self._size):
            self._copy_back(part, current)
        current.record_event(ended)
        self._timed = began, ended

    def take_seconds(self) -> float | None:
        timed, self._timed = self._timed, None
        if timed is None or not timed[1].query():
            return None
        return float(timed[0].elapsed_time(timed[1])) / 1000

    def _copy_out(self, copies: Sequence[BlockCopy], current: torch.cuda.Stream) -> None:
        stage = self._next_stage()
        stage.wait_free(current)
        sources = torch.tensor([copy.source for copy in copies], device=self._device)
        for layer, part in zip(self._layers, stage.layers, strict=True):
            part.key[: len(copies)] = layer.key[sources]
            part.value[: len(copies)] = layer.value[sources]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for row, copy in zip(stage.rows, copies, strict=False):
                self._rows[copy.target].copy_(row, non_blocking=True)
        stage.free = self._stream.record_event()

    def _copy_back(self, copies: Sequence[BlockCopy], current: torch.cuda.Stream) -> None:
        stage = self._next_stage()
        stage.wait_free(self._stream)
        with torch.cuda.stream(self._stream):
            for row, copy in zip(stage.rows, copies, strict=False):
                row.copy_(self._rows[copy.source], non_blocking=True)
        current.wait_stream(self._stream)
        targets = torch.tensor([copy.target for copy in copies], device=self._device)
        for layer, part in zip(self._layers, stage.layers, strict=True):
            layer.key[targets] = part.key[: len(copies)]
            layer.value[targets] = part.value[: len(copies)]
        stage.free = current.record_event()

    def _next_stage(self) -> _Stage:
        self._turn = 1 - self._turn
        return self._stages[self._turn]


class _Stage:
    """A buffer on the device for ``size`` blocks, one row each."""

    def __init__(self, pool: KVPool, size: int) -> None:
        elements = pool.geometry.elements_per_token * pool.block_size
        self.rows = torch.empty((size, elements), dtype=pool.dtype, device=pool.device)
        self.layers = _cut(pool, self.rows)
        self.free: torch.cuda.Event | None = None

    def wait_free(self, stream: torch.cuda.Stream) -> None:
        if self.free is not None:
            stream.wait_event(self.free)


def _stored(pool: KVPool) -> list[LayerPool]:
    """The layers that have memory of their own."""
    return [layer for layer in pool.layers if layer.writes]


def _cut(pool: KVPool, rows: Tensor) -> list[LayerPool]:
    """The same layers as views of ``rows`` (``[N, elements of a block]``), N blocks each."""
    layers, first = [], 0
    for layer in _stored(pool):
        parts = []
        for tensor in (layer.key, layer.value):
            shape = tensor.shape[1:]
            part = rows[:, first : first + shape.numel()]
            parts.append(part.view(len(rows), *shape))
            first += shape.numel()
        layers.append(LayerPool(parts[0], parts[1], writes=True))
    assert first == rows.shape[1]
    return layers


def _parts(copies: Sequence[BlockCopy], size: int) -> Iterator[Sequence[BlockCopy]]:
    for first in range(0, len(copies), size):
        yield copies[first : first + size]

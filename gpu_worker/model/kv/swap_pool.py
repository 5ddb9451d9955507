"""Host memory for the KV of preempted sequences, and the copies between it and the KV pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from penstock.shared.errors import InsufficientMemory

from .kv_pool import KVPool, LayerPool
from .memory_budget import format_bytes

if TYPE_CHECKING:
    from ...engine.plan import BlockCopy

__all__ = ["SwapPool"]

_STAGE_BYTES = 64 << 20
"""Of each of the two buffers through which a GPU's blocks pass. A step that copies out no more than
both hold waits for no copy."""


class SwapPool:
    """Blocks of host memory; the engine knows which sequence owns which block.

    One row of memory holds one device block in all layers of a KV cache group. So a block crosses
    the bus as one copy. Beside a GPU the memory is pinned.

    Args:
        pool: whose blocks are kept here.
        num_blocks: rows of each KV cache group; at least one has some.

    Raises:
        InsufficientMemory: the host cannot give the memory.
    """

    def __init__(self, pool: KVPool, num_blocks: Sequence[int]) -> None:
        on_gpu = pool.device.type == "cuda"
        stored = [_stored(pool, group) for group in range(len(pool.groups))]
        sizes = [
            count * _row_size(layers) for count, layers in zip(num_blocks, stored, strict=True)
        ]
        try:
            memory = torch.empty(sum(sizes), dtype=pool.dtype, pin_memory=on_gpu)
        except (MemoryError, RuntimeError) as error:
            size = format_bytes(sum(sizes) * pool.dtype.itemsize)
            raise InsufficientMemory(
                f"the host cannot give {size} for {sum(num_blocks)} blocks of swapped KV; "
                "lower engine.swap_memory, or set it to 0 for no swapping"
            ) from error
        parts = torch.split(memory, sizes)
        self._sides: list[_Direct | _Streamed] = []
        for count, layers, part in zip(num_blocks, stored, parts, strict=True):
            rows = part.view(count, _row_size(layers))
            self._sides.append(
                _Streamed(pool.device, layers, rows) if on_gpu else _Direct(layers, rows)
            )

    def swap(self, out: Sequence[BlockCopy], back: Sequence[BlockCopy]) -> None:
        """Copy blocks to the host, then blocks from the host.

        On a GPU this only queues work. What the current stream runs afterwards finds the copies
        made, and may write the blocks that were copied out.
        """
        for group, side in enumerate(self._sides):
            mine = [[copy for copy in copies if copy.group == group] for copies in (out, back)]
            if any(mine):
                side.swap(*mine)

    def take_seconds(self) -> float | None:
        """Seconds that the device spent on the last :meth:`swap`; each is told once.

        Call it after waiting for the step. None if there was no swap since the last call.
        """
        taken = [side.take_seconds() for side in self._sides]
        seconds = [one for one in taken if one is not None]
        return sum(seconds) if seconds else None


class _Direct:
    """The device's memory is the host's: copies are made at once."""

    def __init__(self, layers: list[LayerPool], rows: Tensor) -> None:
        self._layers, self._kept = layers, _cut(layers, rows)
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

    Blocks lie scattered over the layers' tensors. So the compute stream first gathers them into a
    staging buffer, at the speed of device memory. Then their places may be overwritten, and the
    slow transfer over the bus runs beside the forward pass. On the way back the transfer comes
    first, and the compute stream waits for it, since the forward pass reads these blocks.

    Order between the streams:

    - a buffer is reused only after ``free``, the event of its last use;
    - rows of the host are touched on the copy stream alone, and so in the order of the calls.
    """

    def __init__(self, device: torch.device, layers: list[LayerPool], rows: Tensor) -> None:
        self._device, self._rows = device, rows
        self._layers = layers
        self._stream: torch.cuda.Stream = cast(Any, torch.cuda.Stream)(device)
        row_bytes = rows.shape[1] * rows.dtype.itemsize
        size = max(1, min(len(rows), _STAGE_BYTES // row_bytes))
        self._size = size
        self._stages = [_Stage(layers, size) for _ in range(2)]
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

    def __init__(self, layers: list[LayerPool], size: int) -> None:
        like = layers[0].key
        self.rows = torch.empty((size, _row_size(layers)), dtype=like.dtype, device=like.device)
        self.layers = _cut(layers, self.rows)
        self.free: torch.cuda.Event | None = None

    def wait_free(self, stream: torch.cuda.Stream) -> None:
        if self.free is not None:
            stream.wait_event(self.free)


def _stored(pool: KVPool, group: int) -> list[LayerPool]:
    """The layers of a KV cache group that have memory of their own."""
    return [layer for layer in pool.layers if layer.writes and layer.group == group]


def _row_size(layers: list[LayerPool]) -> int:
    """Elements of a block in all ``layers``."""
    return sum(layer.key[0].numel() + layer.value[0].numel() for layer in layers)


def _cut(layers: list[LayerPool], rows: Tensor) -> list[LayerPool]:
    """The same layers as views of ``rows`` (``[N, elements of a block]``), N blocks each."""
    views, first = [], 0
    for layer in layers:
        parts = []
        for tensor in (layer.key, layer.value):
            shape = tensor.shape[1:]
            part = rows[:, first : first + shape.numel()]
            parts.append(part.view(len(rows), *shape))
            first += shape.numel()
        views.append(LayerPool(parts[0], parts[1], writes=True, group=layer.group))
    assert first == rows.shape[1]
    return views


def _parts(copies: Sequence[BlockCopy], size: int) -> Iterator[Sequence[BlockCopy]]:
    for first in range(0, len(copies), size):
        yield copies[first : first + size]

"""The paged KV pool: each layer has a tensor of keys and one of values, divided into blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.shared.errors import InsufficientMemory

from ...engine.kv.kv_cache_groups import KVCacheGroup
from ..loading.geometry import KVGeometry, LayerGeometry
from .layer_groups import groups_of_layers
from .memory_budget import format_bytes

if TYPE_CHECKING:
    from ...engine.plan import BlockCopy

__all__ = ["KVPool", "LayerPool", "blocks_in_budget"]


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Where one layer's KV lies.

    Attributes:
        key: ``[num_blocks, ...]``, a block as the geometry's layout says: ``[block_size, Hkv, Dk]``
            in ``KVLayout.TOKENS``.
        value: ``[num_blocks, ...]``, in the same layout.
        writes: False for a layer that reads what an earlier one has stored.
        group: index of its KV cache group, and so of its block table in a sequence.
    """

    key: Tensor
    value: Tensor
    writes: bool
    group: int


def blocks_in_budget(
    geometry: KVGeometry,
    block_size: int,
    dtype: torch.dtype,
    budget_bytes: int,
    draft: KVGeometry | None = None,
) -> int:
    """How many blocks fit in ``budget_bytes``.

    Args:
        geometry: of the model.
        block_size: tokens in a block.
        dtype: of the KV.
        budget_bytes: memory for all blocks.
        draft: of the draft model, whose KV lies in the same blocks; None if there is none.

    Raises:
        InsufficientMemory: not even one fits.
    """
    size = geometry.block_bytes(block_size, dtype)
    size += 0 if draft is None else draft.block_bytes(block_size, dtype)
    count = budget_bytes // size
    if count < 1:
        models = "this model" if draft is None else "this model and its draft model"
        raise InsufficientMemory(
            f"engine.kv_memory: a budget of {format_bytes(budget_bytes)} holds no block of "
            f"{block_size} tokens, which takes {size} bytes ({format_bytes(size)}) in {models}; "
            "set it to at least as many blocks as the sequences that run at the same time need, "
            "or lower engine.block_size"
        )
    return count


class KVPool:
    """Storage for the KV of all sequences; the engine knows which sequence owns which block.

    Args:
        geometry: of the model.
        blocks: the KV cache groups; each layer belongs to the narrowest one that keeps all it
            reads. A number makes one group for all layers, which keeps everything.
        block_size: tokens in a block.
        device: of the tensors.
        dtype: in which the model computes; of the tensors, too, unless the layout has its own.

    Raises:
        InsufficientMemory: the device cannot give the memory.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        blocks: int | Sequence[KVCacheGroup],
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.geometry = geometry
        self.groups = (KVCacheGroup(blocks),) if isinstance(blocks, int) else tuple(blocks)
        self.num_blocks = self.groups[0].num_blocks
        self.block_size = block_size
        self.device = device
        self.dtype = geometry.layout.stored_dtype(dtype)
        self._group_of = groups_of_layers(geometry, self.groups)
        layers: list[LayerPool] = []
        try:
            for layer, group in zip(geometry.layers, self._group_of, strict=True):
                if layer.shares is None:
                    layers.append(self._allocate(layer, group))
                else:
                    source = layers[layer.shares]
                    layers.append(LayerPool(source.key, source.value, writes=False, group=group))
        except (torch.OutOfMemoryError, RuntimeError, OSError) as error:
            count = " and ".join(str(group.num_blocks) for group in self.groups)
            raise InsufficientMemory(
                f"{device} cannot give {format_bytes(self.num_bytes)} for {count} KV blocks of "
                f"{block_size} tokens "
                f"({_first_line(error)}); lower engine.kv_memory"
            ) from error
        self.layers = tuple(layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.geometry.block_bytes(self.block_size, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        num_elements = sum(
            self.geometry.layer_elements(layer, self.block_size, self.dtype)
            * self.groups[group].num_blocks
            for layer, group in zip(self.geometry.layers, self._group_of, strict=True)
        )
        return num_elements * self.dtype.itemsize

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers of their group; all are read before any is written.

        Args:
            copies: no block of a group may be the target of two.
        """
        for group in sorted({copy.group for copy in copies}):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            sources, targets = torch.tensor(pairs, device=self.device).T
            for layer in self.layers:
                if layer.writes and layer.group == group:
                    layer.key[targets] = layer.key[sources]
                    layer.value[targets] = layer.value[sources]

    def _allocate(self, layer: LayerGeometry, group: int) -> LayerPool:
        count, heads = self.groups[group].num_blocks, layer.num_kv_heads
        layout = self.geometry.layout
        key = layout.key_shape(self.block_size, heads, layer.key_dim, self.dtype)
        value = layout.value_shape(self.block_size, heads, layer.value_dim)
        return LayerPool(
            _zeros((count, *key), self.dtype, self.device),
            _zeros((count, *value), self.dtype, self.device),
            writes=True,
            group=group,
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because a masked score multiplies what lies in an unused slot, and 0 * NaN is NaN.

    On a CPU the system gives zero pages as they are touched. ``torch.zeros`` would write them all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping.
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""The KV cache groups of a model, the layers that belong to each, and how many blocks it gets."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from ...engine.config import EngineConfig
from ...engine.kv.kv_cache_groups import KVCacheGroup, most_blocks_held
from ..loading.geometry import KVGeometry

__all__ = ["groups_in_budget", "groups_of_layers", "windows_of_groups"]


def windows_of_groups(geometry: KVGeometry, context: int) -> tuple[int | None, ...]:
    """The windows of a model's KV cache groups, widest first; None sees everything.

    Args:
        geometry: of the model.
        context: longest sequence in tokens; a window of this size counts as None.
    """
    windows = set(geometry.kept_windows(context))
    return tuple(sorted(windows, key=_width, reverse=True))


def groups_of_layers(geometry: KVGeometry, groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """The group index of each layer: the narrowest group that keeps all the layer reads.

    Raises:
        ValueError: a layer reads more than any group keeps.
    """
    found = []
    for index, window in enumerate(geometry.kept_windows(sys.maxsize)):
        wide = [i for i, group in enumerate(groups) if _width(group.window) >= _width(window)]
        if not wide:
            raise ValueError(
                f"no KV cache group of {groups} is as wide as layer {index} ({window})"
            )
        found.append(min(wide, key=lambda i: _width(groups[i].window)))
    return tuple(found)


def groups_in_budget(
    geometry: KVGeometry,
    dtype: torch.dtype,
    budget_bytes: int,
    config: EngineConfig,
    *,
    use_all: bool,
    draft: KVGeometry | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Split a budget between the KV cache groups of a model.

    Layers with a window never need more than ``max_sequences`` windows, so they get no more. The
    rest of the memory goes to the layers that keep everything. Below that bound, all groups get
    equally many blocks.

    Args:
        geometry: of the model.
        dtype: in which it computes.
        budget_bytes: holds at least one block of every layer.
        config: limits of the engine; its KV cache groups are ignored.
        use_all: spend also what no running sequence can need, on more cached prefixes.
        draft: of the draft model. Its KV has the block numbers of the first group, so each
            of those blocks takes more.
    """
    windows = windows_of_groups(geometry, config.max_model_len)
    layers = groups_of_layers(geometry, [KVCacheGroup(1, window) for window in windows])
    block_bytes = [0] * len(windows)
    for layer, group in zip(geometry.layers, layers, strict=True):
        elements = geometry.layer_elements(layer, config.block_size, dtype)
        block_bytes[group] += elements * geometry.layout.stored_dtype(dtype).itemsize
    costs = list(block_bytes)
    if draft is not None:
        costs[0] += draft.block_bytes(config.block_size, dtype)
    enough = [_most_needed(window, config) for window in windows]
    counts: dict[int, int] = {}
    remaining = budget_bytes
    while len(counts) < len(windows):
        missing = [group for group in range(len(windows)) if group not in counts]
        each = remaining // sum(costs[group] for group in missing)
        bounded = missing[1:] if use_all and 0 in missing else missing
        filled = [group for group in bounded if enough[group] <= each]
        for group in filled or missing:
            counts[group] = enough[group] if filled else each
            remaining -= counts[group] * costs[group]
    return tuple(
        KVCacheGroup(counts[group], window, block_bytes=block_bytes[group])
        for group, window in enumerate(windows)
    )


def _most_needed(window: int | None, config: EngineConfig) -> int:
    """Blocks for a full batch of sequences that each hold as many as they ever may."""
    each = -(-config.max_model_len // config.block_size)
    if window is not None:
        each = min(each, most_blocks_held(window, config.max_span, config.block_size))
    return config.max_sequences * each


def _width(window: int | None) -> float:
    return math.inf if window is None else window

"""The KV kinds of a model, the layers that belong to each, and how many blocks it gets."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from ...engine.config import EngineConfig
from ...engine.kv.kv_cache_groups import KVCacheGroup, most_blocks_held
from ..loading.geometry import KVGeometry

__all__ = ["kinds_in_budget", "kinds_of_layers", "windows_of_kinds"]


def windows_of_kinds(geometry: KVGeometry, context: int) -> tuple[int | None, ...]:
    """The windows of the KV kinds of a model, widest first; None, which is widest, sees all.

    Args:
        geometry: of the model.
        context: longest sequence, in tokens; a window of that size is none.
    """
    windows = set(geometry.kept_windows(context))
    return tuple(sorted(windows, key=_width, reverse=True))


def kinds_of_layers(geometry: KVGeometry, kinds: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """Per layer the index of its kind: the narrowest that keeps all the layer reads.

    Raises:
        ValueError: no kind keeps all that some layer reads.
    """
    found = []
    for index, window in enumerate(geometry.kept_windows(sys.maxsize)):
        wide = [i for i, kind in enumerate(kinds) if _width(kind.window) >= _width(window)]
        if not wide:
            raise ValueError(f"no KV kind of {kinds} is as wide as layer {index} ({window})")
        found.append(min(wide, key=lambda i: _width(kinds[i].window)))
    return tuple(found)


def kinds_in_budget(
    geometry: KVGeometry,
    dtype: torch.dtype,
    budget_bytes: int,
    config: EngineConfig,
    *,
    use_all: bool,
    draft: KVGeometry | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Split a budget between the KV kinds of a model.

    Layers with a window never need more than ``max_sequences`` windows, so they get no more; the
    rest of the memory is for the layers that keep everything. As long as that bound is not
    reached, all kinds get equally many blocks.

    Args:
        geometry: of the model.
        dtype: of its KV.
        budget_bytes: holds at least one block of every layer.
        config: limits of the engine; its own pools are not looked at.
        use_all: spend what no running sequence can need, too: on more cached prefixes.
        draft: of the draft model. Its KV has the block numbers of the first kind, so a block of
            that takes as much more.
    """
    windows = windows_of_kinds(geometry, config.max_model_len)
    layers = kinds_of_layers(geometry, [KVCacheGroup(1, window) for window in windows])
    token_bytes = [0] * len(windows)
    for layer, kind in zip(geometry.layers, layers, strict=True):
        token_bytes[kind] += layer.elements_per_token * dtype.itemsize
    block_bytes = [size * config.block_size for size in token_bytes]
    costs = list(block_bytes)
    if draft is not None:
        costs[0] += draft.elements_per_token * dtype.itemsize * config.block_size
    enough = [_most_needed(window, config) for window in windows]
    counts: dict[int, int] = {}
    remaining = budget_bytes
    while len(counts) < len(windows):
        missing = [kind for kind in range(len(windows)) if kind not in counts]
        each = remaining // sum(costs[kind] for kind in missing)
        bounded = missing[1:] if use_all and 0 in missing else missing
        filled = [kind for kind in bounded if enough[kind] <= each]
        for kind in filled or missing:
            counts[kind] = enough[kind] if filled else each
            remaining -= counts[kind] * costs[kind]
    return tuple(
        KVCacheGroup(counts[kind], window, block_bytes=block_bytes[kind])
        for kind, window in enumerate(windows)
    )


def _most_needed(window: int | None, config: EngineConfig) -> int:
    """Blocks with which every sequence of a full batch can have as many as it ever holds."""
    each = -(-config.max_model_len // config.block_size)
    if window is not None:
        each = min(each, most_blocks_held(window, config.max_span, config.block_size))
    return config.max_sequences * each


def _width(window: int | None) -> float:
    return math.inf if window is None else window

"""The shape of a model's KV, learned by watching one small forward.

A configuration tells too little. Heads may be local to a tensor-parallel rank, and MLA caches other
sizes than its head count suggests. Layers may differ, and some reuse another layer's KV. So the
shapes are read from the tensors that reach the attention function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.kv_layout import KVLayout

from ..forward.attention_registry import implementation_of, registered

__all__ = ["KVGeometry", "LayerGeometry", "ProbeResult", "probe_geometry"]

PROBE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer stores and how it attends.

    Attributes:
        num_query_heads: query heads on this device.
        num_kv_heads: key and value heads on this device.
        key_dim: elements of one key head.
        value_dim: elements of one value head.
        window: a token sees itself and the ``window - 1`` tokens before it; None: all of them.
        softcap: scores pass through ``softcap * tanh(score / softcap)``; None: they do not.
        sinks: whether a learned extra logit per head takes part in the softmax.
        shares: index of the earlier layer whose KV this one reads; None: it stores its own.
    """

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """All attention layers in the order in which a forward reaches them.

    Attributes:
        layers: the layers.
        layout: how a block of their KV lies in memory.
    """

    layers: tuple[LayerGeometry, ...]
    layout: KVLayout = KVLayout.TOKENS

    def layer_elements(self, layer: LayerGeometry, block_size: int, dtype: torch.dtype) -> int:
        """Numbers that ``layer`` stores in a block of so many tokens."""
        if layer.shares is not None:
            return 0
        return self.layout.elements(
            block_size, layer.num_kv_heads, layer.key_dim, layer.value_dim, dtype
        )

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a block of so many tokens in all layers."""
        elements = (self.layer_elements(layer, block_size, dtype) for layer in self.layers)
        return sum(elements) * self.layout.stored_dtype(dtype).itemsize

    def kept_windows(self, context: int) -> tuple[int | None, ...]:
        """For each layer, how many tokens of what it reads must be kept; None: all of them.

        That is its own window, or the widest of all layers that read the same keys and values. A
        window of a whole ``context`` counts as None.
        """
        kept = []
        for index, layer in enumerate(self.layers):
            stored = index if layer.shares is None else layer.shares
            readers = [o for i, o in enumerate(self.layers) if stored in (i, o.shares)]
            widest = max(context if o.window is None else o.window for o in readers)
            kept.append(widest if widest < context else None)
        return tuple(kept)

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct sliding windows, ascending; empty when every layer sees everything."""
        return tuple(sorted({layer.window for layer in self.layers if layer.window is not None}))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What :func:`probe_geometry` saw.

    Attributes:
        geometry: of the layers that reached the attention function.
        modules: their attention modules, in the same order.
        vocab_size: width of the logits.
        kv_dtype: of the keys.
        problems: reasons in words why a paged pool cannot serve the model; empty if it can.
    """

    geometry: KVGeometry
    modules: tuple[nn.Module, ...]
    vocab_size: int
    kv_dtype: torch.dtype
    problems: tuple[str, ...]


class _Recorder:
    """An attention function that computes nothing and records its arguments."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.layers: list[LayerGeometry] = []
        self.problems: dict[str, list[int]] = {}
        self.kv_dtype: torch.dtype | None = None
        # Kept until the probe ends: a freed tensor's address could come back for another layer.
        self._stored: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        index = len(self.modules)
        self._find_problems(index, module, query, key, attention_mask)
        shares = self._sharing(key, value)
        self.kv_dtype = self.kv_dtype or key.dtype
        self.modules.append(module)
        self._stored.append((key, value))
        self.layers.append(
            LayerGeometry(
                num_query_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                window=sliding_window or None,
                softcap=softcap or None,
                sinks=s_aux is not None,
                shares=shares,
            )
        )
        heads, tokens = query.shape[1:3]
        return query.new_zeros(1, tokens, heads, value.shape[3]), None

    def _find_problems(
        self, index: int, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None
    ) -> None:
        found = {
            "reuses the attention module of an earlier layer": module in self.modules,
            "attends to other tokens than its own": key.shape[2] != query.shape[2],
            "relies on an attention mask of its own making": mask is not None,
            "lets tokens see later ones": getattr(module, "is_causal", True) is False,
        }
        for problem, present in found.items():
            if present:
                self.problems.setdefault(problem, []).append(index)

    def _sharing(self, key: Tensor, value: Tensor) -> int | None:
        for index, (other_key, other_value) in enumerate(self._stored):
            if _same(key, other_key) and _same(value, other_value):
                earlier = self.layers[index].shares
                return index if earlier is None else earlier
        return None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.device.type == "meta":  # without memory: layers that share hand on the tensor itself
        return one is other
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def probe_geometry(model: Any, device: torch.device) -> ProbeResult:
    """Run a few tokens through ``model`` with an attention function that only records.

    The model is left with its attention implementation as it was.

    Args:
        model: a causal language model of transformers, on ``device`` in its final dtype.
        device: where its inputs go.
    """
    recorder = _Recorder()
    before = implementation_of(model)
    with registered(recorder) as name, torch.inference_mode():
        model.set_attn_implementation(name)
        try:
            ids = torch.arange(1, PROBE_TOKENS + 1, device=device).unsqueeze(0)
            positions = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        finally:
            model.set_attn_implementation(before)
    return ProbeResult(
        geometry=KVGeometry(tuple(recorder.layers)),
        modules=tuple(recorder.modules),
        vocab_size=int(logits.shape[-1]),
        kv_dtype=recorder.kv_dtype or logits.dtype,
        problems=tuple(
            f"layer {indices[0]} {problem}"
            + (f", and so do {len(indices) - 1} others" if indices[1:] else "")
            for problem, indices in recorder.problems.items()
        ),
    )

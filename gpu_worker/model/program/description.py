"""Reads a decoder of transformers into a description from which a program can be made.

The families of the Llama line differ in where norms stand, in what is fused, and in a few factors.
All of that is read off the modules. Every module of a layer must be accounted for; what a forward
does beyond its modules shows in the trial that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.cpu import HeadShape, NormWeights, Rotary

from ..loading.geometry import KVGeometry, LayerGeometry
from ..quantization.coding import Linear
from .feed_forward import MLP, Experts, read_feed_forward
from .modules import Unrecognised, first_of, only, read_linear, read_norm, read_rotary

__all__ = ["Attention", "Decoder", "Layer", "describe"]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention.

    Attributes:
        projections: of queries, keys and values: one fused layer, or three.
        output: the layer behind it.
        geometry: its heads, window and soft cap.
        scale: of the scores.
        rotary: None where positions do not turn anything.
        query_norm: of each head, or of all together.
        key_norm: of each head, or of all together.
        sinks: ``[heads]``.
    """

    projections: tuple[Linear, ...]
    output: Linear
    geometry: LayerGeometry
    scale: float
    rotary: Rotary | None
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    sinks: Tensor | None

    @property
    def shape(self) -> HeadShape:
        """Of its heads."""
        g = self.geometry
        return HeadShape(g.num_query_heads, g.num_kv_heads, g.key_dim, g.value_dim)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: ``x += factor * after(branch(before(x)))``, twice, or both branches of one norm.

    Attributes:
        parallel: both branches read ``before_attention(x)``.
        residual_factor: of both branches.
    """

    attention: Attention
    feed_forward: MLP | Experts
    before_attention: NormWeights | None
    after_attention: NormWeights | None
    before_mlp: NormWeights | None
    after_mlp: NormWeights | None
    parallel: bool
    residual_factor: float


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model; ``logits = softcapped(logit_factor * head(norm(x)))``."""

    embedding: Tensor
    embedding_factor: float
    layers: tuple[Layer, ...]
    norm: NormWeights
    head: Linear
    logit_factor: float
    logit_softcap: float

    def linears(self) -> Iterator[Linear]:
        """All linear layers."""
        for matrix in self.matrices():
            yield from matrix

    def matrices(self) -> Iterator[tuple[Linear, ...]]:
        """All linear layers; those whose weights are parts of one matrix come together."""
        for layer in self.layers:
            yield layer.attention.projections
            yield (layer.attention.output,)
            yield from layer.feed_forward.matrices()
        yield (self.head,)

    @property
    def multiplied_weights(self) -> int:
        """Weights that a row is multiplied with; of experts those that it chooses."""
        matrices: list[tuple[Linear, ...]] = [(self.head,)]
        for layer in self.layers:
            matrices += [layer.attention.projections, (layer.attention.output,)]
            branch = layer.feed_forward
            if isinstance(branch, Experts):
                matrices += [(branch.router,), *branch.chosen * [*branch.experts[0].matrices()]]
            else:
                matrices += branch.matrices()
        return sum(one.out_features * one.in_features for matrix in matrices for one in matrix)

    def mixtures(self) -> Iterator[Experts]:
        """The mixtures of experts among its layers."""
        for layer in self.layers:
            if isinstance(layer.feed_forward, Experts):
                yield layer.feed_forward


# Before and after attention, before and after the MLP, by the names of a layer's norms.
_PLACES: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): (
        "input_layernorm", None, "post_attention_layernorm", None,
    ),
    frozenset({
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    }): (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    frozenset({
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
        "post_mlp_layernorm",
    }): (
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
    frozenset({"input_layernorm"}): ("input_layernorm", None, None, None),
}  # fmt: skip

_OUTPUTS = ("o_proj", "dense")
_PROJECTIONS = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))


def describe(model: Any, geometry: KVGeometry, positions: int) -> Decoder:
    """Read ``model``.

    Args:
        model: a causal language model of transformers, in float32 or bfloat16 on the CPU.
        geometry: of its KV.
        positions: the longest sequence's.

    Raises:
        Unrecognised: something in it is not known.
    """
    config = model.config.get_text_config(decoder=True)
    only(model, {"model", "lm_head"})
    base = model.model
    only(base, {"embed_tokens", "layers", "norm", "final_layernorm", "rotary_emb"})
    kinds = getattr(config, "layer_types", None) or [None] * len(base.layers)
    tables: dict[str | None, Rotary] = {}
    layers = []
    for module, shape, kind in zip(base.layers, geometry.layers, kinds, strict=True):
        if shape.shares is not None:
            raise Unrecognised("layers that share their KV")
        if kind not in tables:
            tables[kind] = read_rotary(base.rotary_emb, module.self_attn, positions, kind)
        layers.append(_layer(module, shape, tables[kind]))
    columns = base.embed_tokens.weight.shape[1]
    norm = base.norm if hasattr(base, "norm") else base.final_layernorm
    return Decoder(
        embedding=base.embed_tokens.weight.detach(),
        embedding_factor=_factor(base.embed_tokens) * getattr(config, "embedding_multiplier", 1.0),
        layers=tuple(layers),
        norm=read_norm(norm, columns),
        head=read_linear(model.lm_head),
        logit_factor=getattr(config, "logit_scale", None)
        or 1 / getattr(config, "logits_scaling", 1.0),
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def _layer(module: Any, geometry: LayerGeometry, rotary: Rotary) -> Layer:
    names = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    places = _PLACES.get(frozenset(names - {"self_attn", "mlp"}))
    if places is None or not names.issuperset({"self_attn", "mlp"}):
        raise Unrecognised(f"{type(module).__name__} of {', '.join(sorted(names))}")
    attention = _attention(module.self_attn, geometry, rotary)
    feed_forward = read_feed_forward(module.mlp)
    parallel = not any(places[1:])
    if parallel and isinstance(feed_forward, Experts):
        raise Unrecognised("experts beside attention")
    columns = attention.output.out_features
    norms = [None if name is None else read_norm(getattr(module, name), columns) for name in places]
    before_attention, after_attention, before_mlp, after_mlp = norms
    return Layer(
        attention,
        feed_forward,
        before_attention,
        after_attention,
        before_mlp,
        after_mlp,
        parallel=parallel,
        residual_factor=float(getattr(module, "residual_multiplier", 1.0)),
    )


def _attention(module: Any, geometry: LayerGeometry, rotary: Rotary) -> Attention:
    names = first_of(module, _PROJECTIONS)
    (output,) = first_of(module, tuple((name,) for name in _OUTPUTS))
    only(module, {*names, output, "q_norm", "k_norm"})
    sinks = getattr(module, "sinks", None)
    norms = [
        _head_norm(getattr(module, name, None), heads, geometry.key_dim)
        for name, heads in (
            ("q_norm", geometry.num_query_heads),
            ("k_norm", geometry.num_kv_heads),
        )
    ]
    scale = getattr(module, "scaling", None)
    # Layers that leave positions out say so, or are Cohere's that see everything.
    turns = bool(getattr(module, "use_rope", True)) and not (
        type(module).__name__ == "Cohere2Attention" and module.sliding_window is None
    )
    return Attention(
        projections=tuple(read_linear(getattr(module, name)) for name in names),
        output=read_linear(getattr(module, output)),
        geometry=geometry,
        scale=geometry.key_dim**-0.5 if scale is None else float(scale),
        rotary=rotary if turns else None,
        query_norm=norms[0],
        key_norm=norms[1],
        sinks=None if sinks is None else sinks.detach(),
    )


def _head_norm(module: Any, heads: int, dim: int) -> NormWeights | None:
    if module is None:
        return None
    weight = getattr(module, "weight", None)
    whole = weight is not None and weight.dim() == 1 and weight.numel() == heads * dim
    return read_norm(module, heads * dim if whole else dim)


def _factor(embedding: nn.Module) -> float:
    """What an embedding multiplies its rows with."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    known = getattr(embedding, "scalar_embed_scale", None)
    if known is not None:
        return float(torch.tensor(known, dtype=weight.dtype))
    if type(embedding) is not nn.Embedding:
        raise Unrecognised(type(embedding).__name__)
    return 1.0

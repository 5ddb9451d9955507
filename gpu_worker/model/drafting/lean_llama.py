"""A forward pass of a Llama without transformers around it, for draft models on a CPU.

A draft model is small, and its step is dispatch: transformers' own forward of two layers takes four
times as long as the arithmetic in it. So for the plain Llama shape, which drafts commonly have,
there is a loop of its own over the same weights and the same paged KV. Any other model runs through
transformers; and so does this one if its logits on a trial step are not the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu
from transformers import LlamaForCausalLM

from penstock.kernels.paged_attention import paged_attention

from ..batch import PackedStep
from ..kv.kv_pool import KVPool
from ..kv.memory_budget import format_bytes
from ..loading.prepack import PackedLinear, lay_out, multiply

__all__ = ["LeanLlama"]

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference of logits in the trial, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    before_attention: Tensor
    before_mlp: Tensor


class LeanLlama:
    """Computes packed steps.

    Use :meth:`of`, which checks that the model has the shape and gives the same logits.
    """

    def __init__(self, model: Any) -> None:
        config, base = model.config, model.model
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._embedding = base.embed_tokens.weight
        self._norm = base.norm.weight
        self._output = lay_out(_weight(model.lm_head))
        self._layers = [
            _Layer(
                lay_out(torch.cat([_weight(getattr(a, f"{n}_proj")) for n in ("q", "k", "v")])),
                lay_out(_weight(a.o_proj)),
                lay_out(torch.cat([_weight(m.gate_proj), _weight(m.up_proj)])),
                lay_out(_weight(m.down_proj)),
                layer.input_layernorm.weight,
                layer.post_attention_layernorm.weight,
            )
            for layer in base.layers
            for a, m in ((layer.self_attn, layer.mlp),)
        ]
        positions = torch.arange(config.max_position_embeddings)
        probe = self._embedding.new_zeros(1, 1, 1)
        cos, sin = base.rotary_emb(probe, positions.unsqueeze(0))
        half = self._dim // 2
        # Rotation as one multiplication each: the sign of the swapped half is in the sine.
        sign = torch.cat((-torch.ones(half), torch.ones(half)))
        self._cos, self._sin = cos[0].unsqueeze(1), (sin[0] * sign).unsqueeze(1)

    @classmethod
    def of(
        cls, model: Any, trial: Callable[[LeanLlama | None], Tensor], spare_bytes: int
    ) -> LeanLlama | None:
        """The lean form of a model; None if it is no plain Llama on a CPU, or fails the trial.

        Args:
            model: as transformers loads it.
            trial: logits of some step by a lean form, or for None by the model itself.
            spare_bytes: memory that its copy of the linear layers' weights may take; if that is
                not enough, the answer is None, too.
        """
        try:
            return cls._tried(model, trial, spare_bytes)
        except Exception as error:
            # Whatever transformers may change in its modules: going on without is always possible.
            log.warning("the draft model runs through transformers, which is slower: %s", error)
            return None

    @classmethod
    def _tried(
        cls, model: Any, trial: Callable[[LeanLlama | None], Tensor], spare_bytes: int
    ) -> LeanLlama | None:
        if not _is_plain(model):
            return None
        needed = _copied_bytes(model)
        if needed > spare_bytes:
            log.info(
                "the draft model runs through transformers, which is slower: %s for a copy of its "
                "weights are more than the %s that can be spared",
                format_bytes(needed),
                format_bytes(spare_bytes),
            )
            return None
        lean = cls(model)
        expected, found = trial(None), trial(lean)
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= TOLERANCE:
            raise RuntimeError(f"logits differ by {difference:.2g}")
        return lean

    def forward(self, step: PackedStep, pool: KVPool) -> Tensor:
        """As ``forward_logits``: stores the step's KV, returns logits ``[num_rows, V]``."""
        batch, heads, kv_heads, dim = step.batches[0], self._heads, self._kv_heads, self._dim
        hidden = embedding(step.input_ids[0], self._embedding)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        last = self._layers[-1]
        for layer, kv in zip(self._layers, pool.layers, strict=True):
            projected = multiply(self._normed(hidden, layer.before_attention), layer.qkv)
            projected = projected.view(-1, heads + 2 * kv_heads, dim)
            turned = projected[:, : heads + kv_heads]
            turned = turned * cos + turned.roll(dim // 2, -1) * sin
            kv.key.view(-1, kv_heads, dim).index_copy_(0, batch.slots, turned[:, heads:])
            kv.value.view(-1, kv_heads, dim).index_copy_(
                0, batch.slots, projected[:, heads + kv_heads :]
            )
            attended = paged_attention(
                turned[:, :heads],
                kv.key,
                kv.value,
                batch,
                scale=dim**-0.5,
                window=None,
                softcap=None,
                sinks=None,
            ).view(-1, heads * dim)
            if layer is last and step.rows.shape[0] != attended.shape[0]:
                hidden, attended = hidden[step.rows], attended[step.rows]
            hidden = hidden + multiply(attended, layer.output)
            gate, up = multiply(self._normed(hidden, layer.before_mlp), layer.gate_up).chunk(2, -1)
            hidden = hidden + multiply(silu(gate).mul_(up), layer.down)
        return multiply(self._normed(hidden, self._norm), self._output)[: step.num_rows]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self._eps))
        return (x * scale).mul_(weight)


def _copied_bytes(model: Any) -> int:
    """Of the weights that :class:`LeanLlama` lays out anew."""
    layers = [model.lm_head]
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        layers += (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
    weights: int = sum(x.in_features * x.out_features for x in layers)
    return weights * torch.float32.itemsize


def _weight(layer: Any) -> Tensor:
    """The weights of a linear layer, row by row."""
    plain = layer.plain_layer() if isinstance(layer, PackedLinear) else layer
    weight: Tensor = plain.weight.detach()
    return weight


def _is_plain(model: Any) -> bool:
    config = model.config
    return (
        type(model) is LlamaForCausalLM
        and model.device.type == "cpu"
        and model.dtype == torch.float32
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and config.rope_parameters.get("rope_type", "default") == "default"
    )

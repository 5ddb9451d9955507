"""What stands behind a layer's attention: one MLP, or a mixture of them.

A mixture's router chooses some experts for each row, each of which is a gated MLP (Shazeer et al.,
2017, "Outrageously Large Neural Networks"). Its matrices are slices of a stack of all experts'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.cpu import Activation, Clamp

from ..quantization.coding import Linear
from ..quantization.quantized_modules import QuantizedLinear, QuantizedStack
from .modules import (
    CLOSE,
    Unrecognised,
    first_of,
    linear_of,
    only,
    read_activation,
    read_linear,
)

__all__ = ["MLP", "Experts", "read_feed_forward"]

_GATED = (("gate_up_proj",), ("gate_proj", "up_proj"))
_PLAIN = (("fc1", "fc2"), ("c_fc", "c_proj"))
_ACTIVATIONS = ("act_fn", "activation_fn", "act")
_ROUTERS = ("gate", "router")


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP, if ``gated``: of one fused layer or two; or a plain one."""

    inner: tuple[Linear, ...]
    down: Linear
    activation: Activation
    gated: bool

    def matrices(self) -> Iterator[tuple[Linear, ...]]:
        """All linear layers; those whose weights are parts of one matrix come together."""
        yield self.inner
        yield (self.down,)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts; a row's output is the sum of its experts' by weight.

    Attributes:
        router: gives a number for each expert.
        chosen: how many experts compute a row: those with the largest numbers.
        normalised: whether weights are a softmax over the chosen numbers, or over all.
        experts: gated, of one shape, with a gate and an up layer each.
        clamp: of their activation, if it is ``CLAMPED_SWIGLU``.
        owner: the module that holds the experts' weights.
    """

    router: Linear
    chosen: int
    normalised: bool
    experts: tuple[MLP, ...]
    clamp: Clamp | None
    owner: nn.Module

    def matrices(self) -> Iterator[tuple[Linear, ...]]:
        """All linear layers; those whose weights are parts of one matrix come together."""
        yield (self.router,)
        for expert in self.experts:
            yield from expert.matrices()

    def give_up_weights(self) -> None:
        """Free the stacks of weights, of which the layers here are slices."""
        for name, parameter in list(self.owner.named_parameters(recurse=False)):
            setattr(self.owner, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))
        for name, value in list(vars(self.owner).items()):
            if isinstance(value, QuantizedStack):
                setattr(self.owner, name, None)


def read_feed_forward(module: Any) -> MLP | Experts:
    """What ``module``, which follows a layer's attention, computes.

    Raises:
        Unrecognised: something in it is not known.
    """
    return _experts(module) if hasattr(module, "experts") else _mlp(module)


def _mlp(module: Any) -> MLP:
    (name,) = first_of(module, tuple((name,) for name in _ACTIVATIONS))
    activation = read_activation(getattr(module, name))
    for gated, choices in ((True, _GATED), (False, _PLAIN)):
        names = next((c for c in choices if all(hasattr(module, n) for n in c)), None)
        if names is None:
            continue
        *inner, down = (*names, "down_proj") if gated else names
        only(module, {*inner, down, name})
        return MLP(
            tuple(read_linear(getattr(module, n)) for n in inner),
            read_linear(getattr(module, down)),
            activation,
            gated,
        )
    raise Unrecognised(f"MLP {type(module).__name__}")


def _experts(module: Any) -> Experts:
    (name,) = first_of(module, tuple((name,) for name in _ROUTERS))
    only(module, {name, "experts"})
    router, owner = getattr(module, name), module.experts
    only(owner, set(_ACTIVATIONS))
    activation, clamp = _expert_activation(owner)
    inner = _matrices(owner, "gate_up_proj")
    down = _matrices(owner, "down_proj")
    together = getattr(owner, "is_concatenated", True)
    weight = router.weight.detach()
    chosen, normalised = _choice(router)
    return Experts(
        linear_of(weight, _bias(router, "bias")),
        chosen,
        normalised,
        tuple(
            MLP(_halves(up, together), below, activation, gated=True)
            for up, below in zip(inner, down, strict=True)
        ),
        clamp,
        owner,
    )


def _expert_activation(owner: Any) -> tuple[Activation, Clamp | None]:
    if hasattr(owner, "alpha") and hasattr(owner, "limit"):
        return Activation.CLAMPED_SWIGLU, Clamp(float(owner.alpha), float(owner.limit))
    return read_activation(owner.act_fn), None


def _choice(router: Any) -> tuple[int, bool]:
    """How many experts a router chooses, and whether their weights are a softmax of their own."""
    weight, bias = router.weight.detach(), _bias(router, "bias")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, weight.shape[1], generator=generator).to(weight.dtype)
    with torch.no_grad():
        _, found, indices = router(x)
    logits = nn.functional.linear(x, weight, bias).float()
    chosen = int(router.top_k)
    if indices.shape == (7, chosen) and torch.equal(indices, logits.topk(chosen).indices):
        for normalised, weights in (
            (True, logits.gather(1, indices).softmax(-1)),
            (False, logits.softmax(-1).gather(1, indices)),
        ):
            if torch.allclose(found.float(), weights, rtol=CLOSE[weight.dtype], atol=1e-6):
                return chosen, normalised
    raise Unrecognised(f"router {type(router).__name__}")


def _matrices(owner: Any, name: str) -> list[Linear]:
    """A linear layer of each expert."""
    stack, bias = getattr(owner, name), _bias(owner, f"{name}_bias")
    if isinstance(stack, QuantizedStack):
        quantized = stack.experts
        return [QuantizedLinear(w, _part(bias, e)) for e, w in enumerate(quantized)]
    transposed = getattr(owner, "is_transposed", False)
    return [
        linear_of(weight.T if transposed else weight, _part(bias, e))
        for e, weight in enumerate(stack.detach())
    ]


def _halves(layer: Linear, together: bool) -> tuple[Linear, Linear]:
    """The gate and the other layer of a fused one, whose outputs lie together or take turns."""
    count = layer.out_features // 2
    picked = (
        (slice(count), slice(count, None)) if together else (slice(0, None, 2), slice(1, None, 2))
    )
    gate, up = (_outputs(layer, part) for part in picked)
    return gate, up


def _outputs(layer: Linear, part: slice) -> Linear:
    bias = None if layer.bias is None else layer.bias.detach()[part]
    if isinstance(layer, QuantizedLinear):
        return QuantizedLinear(layer.quantized.rows(torch.arange(layer.out_features)[part]), bias)
    assert isinstance(layer, nn.Linear)  # those of a model; a file has packed ones
    return linear_of(layer.weight.detach()[part], bias)


def _bias(module: Any, name: str) -> Tensor | None:
    bias = getattr(module, name, None)
    return None if bias is None else bias.detach()


def _part(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]

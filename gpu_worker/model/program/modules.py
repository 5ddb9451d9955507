"""What single modules of a transformers model compute, told by trying them.

Names say little: two families' ``RMSNorm`` differ by a one that is added to the weights. So a norm,
an activation and a rotary function are called on a few numbers, and are what gives the same.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels.cpu import Activation, NormWeights, Rotary

from ..quantization.coding import Linear
from ..quantization.quantized_modules import QuantizedLinear

__all__ = [
    "CLOSE", "Unrecognised", "first_of", "linear_of", "only", "read_activation", "read_linear",
    "read_norm", "read_rotary",
]  # fmt: skip

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far a module's numbers may be from what is expected of it, relatively."""

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
"""Whose frequencies depend on nothing but the configuration, up to the served context."""

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
    Activation.RELU: F.relu,
    Activation.NONE: lambda x: x,
}


class Unrecognised(Exception):
    """The model has something that a program cannot compute; says what."""


def first_of(module: Any, choices: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The first names that ``module`` has all of.

    Raises:
        Unrecognised: there are none.
    """
    for names in choices:
        if all(hasattr(module, name) for name in names):
            return names
    raise Unrecognised(f"{type(module).__name__} without {' or '.join(map('/'.join, choices))}")


def only(module: nn.Module, known: set[str]) -> None:
    """Refuse modules within ``module`` of other names.

    Raises:
        Unrecognised: there is one.
    """
    others = [
        name
        for name, child in module.named_children()
        if name not in known and not isinstance(child, nn.Dropout)
    ]
    if others:
        raise Unrecognised(f"{', '.join(others)} in {type(module).__name__}")


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer over ``weight`` ``[outputs, inputs]`` itself, not a copy."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer.eval()


def read_linear(module: Any) -> Linear:
    """``module`` if it is a linear layer, plain or quantised by us.

    Raises:
        Unrecognised: it is adapted, quantised by others or something else.
    """
    if type(module) is QuantizedLinear:
        return module
    if type(module) is not nn.Linear or module.weight.device.type != "cpu":
        raise Unrecognised(f"{type(module).__name__} in the place of a linear layer")
    return module


def read_norm(module: nn.Module, columns: int) -> NormWeights:
    """The norm that ``module`` computes over ``columns`` numbers.

    Raises:
        Unrecognised: none that is known.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    epsilon = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)),
        None,
    )
    dtype = torch.float32 if weight is None else weight.dtype
    if epsilon is None or dtype not in CLOSE:
        raise Unrecognised(f"norm {type(module).__name__}")
    heads = weight.shape[0] if weight is not None and weight.dim() == 2 else 1
    x = torch.randn(5, heads, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x if weight is not None and weight.dim() == 2 else x[:, 0]
    # An odd scale and mean, so that neither epsilon nor the mean is lost in rounding.
    x = 0.1 * x + 0.05
    expected = module(x).float()
    for candidate in _norms(columns, float(epsilon), weight, bias):
        if _close(_apply(candidate, x.float()), expected, dtype):
            return candidate
    raise Unrecognised(f"norm {type(module).__name__}")


def _norms(
    columns: int, epsilon: float, weight: Tensor | None, bias: Tensor | None
) -> Iterator[NormWeights]:
    values = None if weight is None else weight.detach().float()
    offset = None if bias is None else bias.detach().float()
    for centred in (False, True):
        yield NormWeights(columns, epsilon, values, offset, centred)
    if values is not None:
        yield NormWeights(columns, epsilon, 1 + values, offset)


def _apply(norm: NormWeights, x: Tensor) -> Tensor:
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    y = y if norm.weight is None else y * norm.weight
    return y if norm.bias is None else y + norm.bias


def read_activation(function: Any) -> Activation:
    """The activation that ``function`` computes.

    Raises:
        Unrecognised: none that is known.
    """
    x = torch.linspace(-6, 6, 97)
    found = function(x)
    for activation, candidate in _ACTIVATIONS.items():
        if torch.allclose(found, candidate(x), rtol=1e-6, atol=1e-6):
            return activation
    raise Unrecognised(f"activation {type(function).__name__}")


def read_rotary(
    embedding: nn.Module, attention: nn.Module, positions: int, layer_type: str | None
) -> Rotary:
    """The rotary positions of one kind of layer.

    Args:
        embedding: gives cosines and sines for positions.
        attention: a module that turns queries and keys by them.
        positions: so many from 0.
        layer_type: which of the embedding's sets; None if it has one.

    Raises:
        Unrecognised: its frequencies change with the length of a sequence, or it turns otherwise.
    """
    kinds = getattr(embedding, "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind not in _ROPE_TYPES:
            raise Unrecognised(f"rotary positions of type {kind}")
    where = torch.arange(positions).unsqueeze(0)
    extra = {"layer_type": layer_type} if _takes_layer_type(embedding) else {}
    cosines, sines = (t[0].float() for t in embedding(torch.zeros(1), where, **extra))
    # Most families give each pair's numbers twice, gpt-oss once.
    once = len(getattr(embedding, "inv_freq", ())) == cosines.shape[-1]
    half = cosines.shape[-1] if once else cosines.shape[-1] // 2
    by_halves = once or torch.equal(cosines[:, :half], cosines[:, half:])
    picked = slice(half) if by_halves else slice(0, None, 2)
    interleaved = _turns_neighbours(attention, cosines, sines, 2 * half)
    if interleaved is None:
        interleaved = not by_halves
    return Rotary(cosines[:, picked].contiguous(), sines[:, picked].contiguous(), interleaved)


def _takes_layer_type(embedding: nn.Module) -> bool:
    return "layer_type" in inspect.signature(embedding.forward).parameters


def _turns_neighbours(
    attention: nn.Module, cosines: Tensor, sines: Tensor, dims: int
) -> bool | None:
    """Whether pairs are neighbours in the family's own function; None if it has none."""
    function = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if function is None or len(cosines) < 2:
        return None
    x = torch.zeros(1, 1, 2, dims)
    x[..., 0] = 1.0
    turned = function(x, x, cosines[None, :2], sines[None, :2])[0][0, 0, 1]
    # What the first number gives to others goes to its pair alone.
    return bool(turned[1:].abs().argmax() == 0)


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return bool((found - expected).abs().max() <= CLOSE[dtype] * expected.abs().max())

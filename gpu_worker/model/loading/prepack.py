"""Linear layers on the CPU whose weights are laid out once for the products of a step.

oneDNN multiplies with weights in a blocked layout. ``nn.Linear`` keeps them row by row, so a call
either reorders them first or multiplies at half the speed. PyTorch's own compiler packs weights
ahead with two operators that have no public name; they are looked for, tried and left out where
they do not serve.

Small float32 layers are laid out column by column instead, and stay ordinary tensors: the product
of a few rows then streams through the weights once, however many rows there are. So a step of
eight tokens, such as one that verifies drafts, takes little longer than a step of one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["PackedLinear", "lay_out", "multiply", "prepack_linears"]

log = logging.getLogger(__name__)

COLUMN_WEIGHTS = {torch.float32: 1 << 20, torch.bfloat16: 0}
"""Weights of a layer, by dtype, below which it is laid out by columns.

A oneDNN call has a fixed cost of 10 to 20 us. In float32, one thread of a Xeon with AVX-512, rows,
packed and columns took 15, 29 and 15 us for 512x192 with one row, 23, 31 and 18 with five, 29, 37
and 19 with eight, 99, 105 and 77 with 64; from 1,024x1,024 packed ones are faster. In bfloat16
plain calls pay the fixed cost, too, and packed ones were always faster.
"""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of logits in the trial, relative to the largest logit."""


class PackedLinear(nn.Module):
    """A linear layer over weights in another layout.

    Args:
        layer: what it replaces; on the CPU, float32 or bfloat16.
        packed: the weights of ``layer``: of its shape and strided by columns, or packed by oneDNN.
        keep: whether ``layer`` is kept, as another module uses its weights.
    """

    def __init__(self, layer: nn.Linear, packed: Tensor, keep: bool) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        # Plain attributes: looking a registered parameter up costs as much as a small product.
        self.packed = packed
        self.bias = None if layer.bias is None else layer.bias.detach()
        self._kept = layer if keep else None

    @property
    def weight(self) -> Tensor:
        """The weights; good for their shape and dtype, opaque to arithmetic if oneDNN's alone."""
        return self.packed if self._kept is None else self._kept.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``; x ``[..., in_features]`` to ``[..., out_features]``."""
        return multiply(x, self.packed, self.bias)

    def plain_layer(self) -> nn.Linear:
        """The layer this one replaced, its weights row by row again."""
        if self._kept is not None:
            return self._kept
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain = self.packed.to_dense() if self.packed.is_mkldnn else self.packed.contiguous()
        layer.weight = nn.Parameter(plain, requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias, requires_grad=False)
        return layer.eval()


def lay_out(weight: Tensor) -> Tensor:
    """Weights ``[out, in]`` in the layout in which :func:`multiply` is fastest."""
    if not _can_lay_out(weight):
        return weight
    if weight.numel() < COLUMN_WEIGHTS[weight.dtype]:
        return weight.t().contiguous().t()
    packed: Tensor = _operator("_reorder_linear_weight")(weight)
    return packed


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; x ``[..., in]``, the weights from :func:`lay_out`."""
    if not weight.is_mkldnn:
        return linear(x, weight, bias)
    output: Tensor = _operator("_linear_pointwise").default(x, weight, bias, "none", [], "")
    return output


def prepack_linears(model: nn.Module, trial: Callable[[], Tensor], spare_bytes: int) -> int:
    """Lay the weights of a CPU model's linear layers out anew, if a trial shows no difference.

    Args:
        model: changed in place.
        trial: runs the model on some fixed input; returns its logits.
        spare_bytes: memory that may be taken for weights that must be kept in both layouts,
            because another module uses them too (an output layer tied to the embedding).

    Returns:
        How many layers it was; 0 where the operators are missing or the trial failed.
    """
    if not _available():
        return 0
    before = trial()
    replaced: list[tuple[nn.Module, str]] = []
    try:
        _replace(model, spare_bytes, replaced)
        after = trial()
        difference = float((after - before).abs().max() / before.abs().max())
        if not difference <= TOLERANCE.get(before.dtype, TOLERANCE[torch.bfloat16]):
            raise RuntimeError(f"logits differ by {difference:.2g}")
    except Exception as error:
        # Private operators, and families that reach into their layers' weights: going on without
        # the patch is always possible.
        for parent, name in replaced:
            setattr(parent, name, getattr(parent, name).plain_layer())
        log.warning("linear layers stay unpacked, which is slower but right: %s", error)
        return 0
    log.info("laid out the weights of %d linear layers", len(replaced))
    return len(replaced)


def _operator(name: str) -> Any:
    """An operator of PyTorch's oneDNN namespace, or None where this build has none."""
    return getattr(torch.ops.mkldnn, name, None)


def _available() -> bool:
    return None not in map(_operator, ("_reorder_linear_weight", "_linear_pointwise"))


def _replace(model: nn.Module, spare_bytes: int, replaced: list[tuple[nn.Module, str]]) -> None:
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            # Exactly nn.Linear: a subclass (quantised, adapted) computes something of its own.
            if type(layer) is not nn.Linear or not _can_lay_out(layer.weight):
                continue
            tied = uses[id(layer.weight)] > 1
            if tied:
                spare_bytes -= layer.weight.nbytes
                if spare_bytes < 0:
                    log.info("%s stays unpacked: its weights are shared and memory is short", name)
                    continue
            packed = lay_out(layer.weight.detach())
            setattr(parent, name, PackedLinear(layer, packed, keep=tied))
            replaced.append((parent, name))


def _can_lay_out(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.layout != torch.strided or not _available():
        return False
    if weight.dtype == torch.bfloat16:
        supported = _operator("_is_mkldnn_bf16_supported")
        return supported is not None and bool(supported())
    return weight.dtype == torch.float32

"""Large linear layers on the CPU, packed once for oneDNN.

oneDNN multiplies with weights in a blocked layout. ``nn.Linear`` keeps them row by row, so a call
either reorders them first or multiplies at half the speed. PyTorch's own compiler packs weights
ahead with two operators that have no public name. They are looked up, tried, and left out where
they do not serve.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "prepack_linears"]

log = logging.getLogger(__name__)

LEAST_WEIGHTS = {torch.float32: 1 << 20, torch.bfloat16: 0}
"""Smallest layer, in weights by dtype, that packing makes faster.

A oneDNN call has a fixed cost of 10 to 20 us. In bfloat16, plain calls pay it, too.
"""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of logits in the trial, relative to the largest logit."""


class PackedLinear(nn.Module):
    """A linear layer over weights in oneDNN's layout.

    Args:
        layer: the layer it replaces; on the CPU, float32 or bfloat16.
        keep: whether ``layer`` is kept, because another module uses its weights.
    """

    def __init__(self, layer: nn.Linear, keep: bool) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        # Plain attributes: looking a registered parameter up costs as much as a small product.
        self.packed: Tensor = _operator("_reorder_linear_weight")(layer.weight.detach())
        self.bias = None if layer.bias is None else layer.bias.detach()
        self._kept = layer if keep else None

    @property
    def weight(self) -> Tensor:
        """The weights; if nothing else uses them, only their shape and dtype can be read."""
        return self.packed if self._kept is None else self._kept.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``; x ``[..., in_features]`` to ``[..., out_features]``."""
        multiply = _operator("_linear_pointwise").default
        output: Tensor = multiply(x, self.packed, self.bias, "none", [], "")
        return output

    def plain_layer(self) -> nn.Linear:
        """The layer this one replaced, its weights row by row again."""
        if self._kept is not None:
            return self._kept
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias, requires_grad=False)
        return layer.eval()


def prepack_linears(model: nn.Module, trial: Callable[[], Tensor], spare_bytes: int) -> int:
    """Pack the weights of a CPU model's large linear layers, if a trial shows no difference.

    Args:
        model: changed in place.
        trial: runs the model on some fixed input; returns its logits.
        spare_bytes: memory for weights that must be kept in both layouts because another module
            uses them, too (an output layer tied to the embedding).

    Returns:
        The number of packed layers; 0 where the operators are missing or the trial failed.
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
    log.info("packed the weights of %d linear layers", len(replaced))
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
            if type(layer) is not nn.Linear or not _can_pack(layer.weight):
                continue
            tied = uses[id(layer.weight)] > 1
            if tied:
                spare_bytes -= layer.weight.nbytes
                if spare_bytes < 0:
                    log.info("%s stays unpacked: its weights are shared and memory is short", name)
                    continue
            setattr(parent, name, PackedLinear(layer, keep=tied))
            replaced.append((parent, name))


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.layout != torch.strided or not _available():
        return False
    if weight.numel() < LEAST_WEIGHTS.get(weight.dtype, torch.inf):
        return False
    supported = _operator("_is_mkldnn_bf16_supported")
    return weight.dtype == torch.float32 or (supported is not None and bool(supported()))

"""Scales of a layer's inputs that make its weights round with less error where it matters.

``W x = (W diag(s)) (x / s)``: the columns of inputs that are large are stretched before the weights
are rounded, so that their errors shrink by as much. From Lin et al., "AWQ: Activation-aware Weight
Quantization", 2023, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .form import QuantizedWeight

__all__ = ["ALPHAS", "channel_scales", "output_error"]

ALPHAS = tuple(step / 20 for step in range(1, 20))
"""Exponents to try beside 0, which scales nothing."""

_LEAST = 1e-3
"""Of the mean magnitude, for an input that the texts leave at zero and another text may not."""


def channel_scales(magnitudes: Tensor, alpha: float) -> Tensor:
    """Scales ``[inputs]``, the geometric mean of whose extremes is 1.

    Args:
        magnitudes: float32 ``[inputs]``, the mean of an input's absolute values.
        alpha: 0 to 1.
    """
    mean = magnitudes.mean()
    if not bool(mean > 0):
        return torch.ones_like(magnitudes)
    scales = (magnitudes / mean).clamp_min(_LEAST) ** alpha
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(form: QuantizedWeight, scales: Tensor, weight: Tensor, rows: Tensor) -> float:
    """``|outputs of the quantised layer - outputs| / |outputs|``, Frobenius norms.

    Args:
        form: of ``weight * scales``.
        scales: float32 ``[inputs]``.
        weight: floats ``[outputs, inputs]``.
        rows: float32 ``[rows, inputs]``, inputs of the layer.
    """
    exact = weight.float()
    difference = form.dequantize() / scales - exact
    return float((rows @ difference.T).norm() / (rows @ exact.T).norm().clamp_min(1e-30))

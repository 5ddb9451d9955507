"""Pearson's test of goodness of fit."""

from __future__ import annotations

import math

import torch


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_quantile(degrees: int, z: float = 3.0902) -> float:
    """The 0.999 quantile (z of the normal), by Wilson and Hilferty's cube-root approximation."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3

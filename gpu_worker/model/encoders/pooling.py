"""One vector of the states of a text's tokens, as sentence-transformers defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["pool"]


def pool(states: Tensor, lengths: Tensor, skip: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool the states of each row.

    Args:
        states: of a batch that is padded on the right ``[rows, tokens, width]``.
        lengths: tokens of each row ``[rows]``, int64.
        skip: tokens at the beginning of each row that do not count ``[rows]``, int64.
        modes: ``cls`` takes the first token, ``lasttoken`` the last; further ``mean`` and ``max``.
            ``mean_sqrt_len_tokens`` divides the sum by the root of the count, ``weightedmean``
            weights each token by its position from 1 on. Results are concatenated.

    Returns:
        ``[rows, width * len(modes)]``, in the states' dtype; sums are made in float32.
    """
    positions = torch.arange(states.shape[1], device=states.device)
    counted = (positions >= skip[:, None]) & (positions < lengths[:, None])
    rows = torch.arange(states.shape[0], device=states.device)
    results = []
    for mode in modes:
        if mode == "cls":
            results.append(states[rows, counted.int().argmax(1)])
        elif mode == "lasttoken":
            results.append(states[rows, lengths - 1])
        elif mode == "max":
            results.append(states.masked_fill(~counted[:, :, None], -torch.inf).amax(1))
        else:
            weights = counted.float()
            if mode == "weightedmean":
                weights = weights * (positions + 1)
            total = (states.float() * weights[:, :, None]).sum(1)
            divisor = weights.sum(1, keepdim=True).clamp(min=1e-9)
            if mode == "mean_sqrt_len_tokens":
                divisor = divisor.sqrt()
            results.append((total / divisor).to(states.dtype))
    return torch.cat(results, dim=-1)

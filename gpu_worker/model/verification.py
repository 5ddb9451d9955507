"""Which drafts are taken.

By default each draft is compared with **what the sequence would have been given in its place**: the
sampler draws the token of every row with the random number of that row's index, and drafts are
taken up to the first that differs. So a stream with drafts is, token by token, the stream without,
whatever the drafter, the length and the worker; and its distribution is the target's by
construction. Drafts from a draft model are drawn with the same random numbers, so that the two
agree where the distributions do (Daliri, Musco and Suresh, 2024, "Coupling without Communication
and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampler import Sampleable

__all__ = ["agreed", "take_typical"]


def agreed(drafts: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The tokens a step gives: accepted drafts, and what was chosen after them.

    Args:
        drafts: k proposed tokens.
        chosen: k + 1 tokens, each chosen as if the drafts before it were the sequence's own.

    Returns:
        One to k + 1 tokens. A negative one, which says that a row had none to choose, comes alone.
    """
    count = 0
    while count < len(drafts) and chosen[count] == drafts[count]:
        count += 1
    if count and chosen[count] < 0:  # the next step finds it again, in its first row
        return tuple(chosen[:count])
    return tuple(chosen[: count + 1])


def take_typical(
    chosen: Tensor, rows: Sequence[Sampleable], drafts: Sequence[int], probabilities: Tensor
) -> Tensor:
    """Choose drafts that are likely enough, which is **not exact**, where a request allows it.

    *Typical acceptance* (Cai et al., 2024, "Medusa"): a draft is taken where the target gives it at
    least ``min(e, sqrt(e) * exp(-H))``, with the request's threshold ``e`` and the entropy ``H`` of
    the distribution. What its options forbid has probability 0 and is never taken.

    Args:
        chosen: int64 ``[N]``, what was drawn.
        rows: N.
        drafts: N, the draft of each row; negative where it has none.
        probabilities: float64 ``[N, V]``, the target's, all options applied.

    Returns:
        int64 ``[N]``.
    """
    thresholds = [row.options.accept_threshold for row in rows]
    threshold = torch.tensor(thresholds, dtype=torch.float64, device=chosen.device)
    draft = torch.tensor(drafts, device=chosen.device)
    likely = probabilities.gather(1, draft.clamp(min=0).unsqueeze(1)).squeeze(1)
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    bound = torch.minimum(threshold, threshold.sqrt() * (-entropy).exp())
    taken = (draft >= 0) & (threshold > 0) & (chosen >= 0) & (likely >= bound)
    return torch.where(taken, draft, chosen)

"""Which drafts are taken.

Two ways, and both give the target's distribution exactly.

**Coupled**, the default: each draft is compared with what the sequence would have been given in its
place. The sampler draws every row's token with the random number of that row's index. Drafts are
taken up to the first that differs. So a stream with drafts is, token by token, the stream without,
whatever the drafter, the length and the worker. Its distribution is the target's by construction. A
draft model draws with the same random numbers, so the two agree where their distributions do. See
Daliri, Musco and Suresh, 2024, "Coupling without Communication and Drafter-Invariant Speculative
Decoding".

**Rejection sampling**: a draft ``x`` is accepted with probability ``min(1, p(x) / q(x))``, else the
token is drawn from ``max(0, p - q)``. See Leviathan, Kalman and Matias, 2023, "Fast Inference from
Transformers via Speculative Decoding". And Chen et al., 2023, "Accelerating Large Language Model
Decoding with Speculative Sampling". No other way accepts more; but which token comes then depends
on where drafts began and ended, and so on load and worker. Its distribution does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling.random_numbers import uniform
from ..sampling.sampler import Sampleable

__all__ = ["DRAFT_STREAM", "agreed", "reject", "take_typical"]

_ACCEPT_STREAM, _RESAMPLE_STREAM, DRAFT_STREAM = 1, 2, 3
"""Rejection sampling draws up to four times for a token; 0 is the sampler's own stream."""


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


def reject(
    chosen: Tensor,
    rows: Sequence[Sampleable],
    drafts: Sequence[int],
    target: Tensor,
    proposed: Tensor,
) -> Tensor:
    """Choose each row's token by rejection sampling.

    A rejected draft has a residual of 0 and is never drawn again. So the first row in which choice
    and draft differ is the first rejected one, as :func:`agreed` takes it.

    Args:
        chosen: int64 ``[N]``, drawn from the target; stays where there is no draft.
        rows: N.
        drafts: N, the draft of each row; negative where it has none.
        target: float64 ``[N, V]``, p, all options applied.
        proposed: float64 ``[N, V]``, q, from which the drafts were drawn.

    Returns:
        int64 ``[N]``.
    """
    seeds = torch.tensor([row.seed for row in rows])
    choices = torch.tensor([row.choice for row in rows])
    indexes = torch.tensor([row.num_output_tokens for row in rows])
    accept, resample = (
        uniform(seeds, choices, indexes, stream).to(chosen.device)
        for stream in (_ACCEPT_STREAM, _RESAMPLE_STREAM)
    )
    draft = torch.tensor(drafts, device=chosen.device)
    place = draft.clamp(min=0).unsqueeze(1)
    p, q = target.gather(1, place).squeeze(1), proposed.gather(1, place).squeeze(1)
    through = (target - proposed).clamp_(min=0).cumsum(dim=-1)
    total = through[:, -1:]
    # Nothing remains only where p is q, up to rounding: then every draft is as good as a draw.
    taken = (accept * q < p) | (total.squeeze(1) <= 0)
    drawn = torch.searchsorted(through, resample.unsqueeze(1) * total, right=True).squeeze(1)
    drawn.clamp_(max=target.shape[1] - 1)
    changed = (draft >= 0) & (chosen >= 0)
    return torch.where(changed, torch.where(taken, draft, drawn), chosen)


def take_typical(
    chosen: Tensor, rows: Sequence[Sampleable], drafts: Sequence[int], probabilities: Tensor
) -> Tensor:
    """Choose drafts that are likely enough, which is **not exact**, where a request allows it.

    *Typical acceptance* (Cai et al., 2024, "Medusa") takes a draft to which the target gives at
    least ``min(e, sqrt(e) * exp(-H))``. Here ``e`` is the request's threshold and ``H`` the entropy
    of the distribution. What its options forbid has probability 0 and is never taken.

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

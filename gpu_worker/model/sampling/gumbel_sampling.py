"""Samples tokens: temperature, top-k, top-p and min-p, then the Gumbel-max trick.

Each token's score, ``logit / temperature``, gets Gumbel noise of its own, and the largest sum wins.
A token wins with the probability that the softmax gives it (Gumbel, 1954; the exponential race of
Efraimidis and Spirakis, 2006, is the same). The noise is a function of (seed, choice, index, token
id) alone. Inverting the cumulative distribution at one random number would need less noise. But
there, a rounding in one logit moves the borders of all later tokens, and a row's token could change
with its batch. Here a rounding decides only between two tokens that are equal to the last digit.
For the same reason two models that nearly agree nearly always draw the same token, and drafts gain
from that.

Top-p compares probabilities that are held as **integers**: ``trunc(exp((logit - largest) /
temperature) * 2**s)``. The shift ``s`` is the largest for which a row's sum fits into 62 bits (44
for a vocabulary of 2**18). Integer sums do not depend on the order of summation. So a row's token
depends on that row alone, not on how a device splits a scan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.shared.protocol.sampling_options import SamplingOptions

from .random_numbers import BITS, DrawKeys, gumbel

__all__ = [
    "Filters",
    "SampledRows",
    "draw",
    "integer_weights",
    "largest",
    "most_likely",
    "narrows",
    "rank",
    "rows_at_once",
    "weight_shift",
    "weights",
]

_CANDIDATES = 256
"""Most likely tokens to rank first for top-p; rows that need more are ranked again."""

_WIDEN = 16

_BLOCK = 64
"""Logits among which the largest is looked for one by one."""

_FEW_LOGITS = 1 << 15
"""Below this number, blocks do not pay: they take four operations more."""

_SLICE_ELEMENTS = {"cpu": 1 << 16}
_SLICE_ELEMENTS_ELSEWHERE = 1 << 24
"""Logits drawn from at a time. On a CPU the int64 temporaries stay in a core's second-level cache:
4 times faster than whole batches at 32 rows of 150,000. Elsewhere it bounds them to 128 MiB each.
"""


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and the first place of it, as ``logits.max(dim=-1)``.

    On a CPU ``max`` with places takes 20 times as long as the values alone. Finding the blocks of
    the largest values first is three times as fast.
    """
    vocab_size = logits.shape[-1]
    few = logits.shape[0] < 2 or vocab_size < _BLOCK or logits.numel() < _FEW_LOGITS
    if few or logits.is_cuda:
        values, places = logits.max(dim=-1)
        return values, places
    whole = vocab_size - vocab_size % _BLOCK
    blocks = logits[:, :whole].view(len(logits), -1, _BLOCK).amax(-1)
    if whole < vocab_size:
        blocks = torch.cat((blocks, logits[:, whole:].amax(-1, keepdim=True)), 1)
    values, block = blocks.max(dim=-1)
    # The last block reaches back into the one before, which has nothing as large.
    begin = (block * _BLOCK).clamp_(max=vocab_size - _BLOCK).unsqueeze(1)
    places = torch.arange(_BLOCK, device=logits.device)
    inside = logits.gather(1, begin + places).argmax(-1, keepdim=True)
    return values, (begin + inside).squeeze(1)


def narrows(options: SamplingOptions) -> bool:
    """Whether top-k, top-p or min-p may exclude tokens."""
    return options.top_k > 0 or options.top_p < 1 or options.min_p > 0


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of ``R`` rows, each of which has at least one of them.

    Attributes:
        top_k: int64 ``[R]``, 0 for all.
        top_p: float64 ``[R]``, 1 for all.
        log_min_p: float32 ``[R]``, -inf for all tokens; None if every row keeps all.
        widest_k: the largest of ``top_k``.
        any_without_k: whether one of ``top_k`` is 0.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor | None
    widest_k: int
    any_without_k: bool

    @classmethod
    def from_options(
        cls, options: Sequence[SamplingOptions], device: torch.device
    ) -> Filters | None:
        """The filters of rows with these options; None if they have none."""
        if not any(map(narrows, options)):
            return None
        top_k = [option.top_k for option in options]
        top_p = [option.top_p for option in options]
        min_p = [option.min_p for option in options]
        logs = [math.log(p) if p > 0 else -math.inf for p in min_p]
        return cls(
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor(logs, dtype=torch.float32, device=device) if any(min_p) else None,
            max(top_k),
            min(top_k) == 0,
        )

    def of(self, rows: Tensor | slice) -> Filters:
        """Those of some of the rows."""
        log_min_p = None if self.log_min_p is None else self.log_min_p[rows]
        return Filters(
            self.top_k[rows], self.top_p[rows], log_min_p, self.widest_k, self.any_without_k
        )


@dataclass(frozen=True, slots=True)
class SampledRows:
    """``R`` rows that are sampled in one call.

    Attributes:
        rows: int64 ``[R]``, positions in the batch.
        temperature: float32 ``[R, 1]``, positive.
        filters: None if no row has top-k, top-p or min-p.
        keys: of this step's random numbers.
    """

    rows: Tensor
    temperature: Tensor
    filters: Filters | None
    keys: DrawKeys


def draw(logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
    """Draw a token from each of these rows.

    Args:
        logits: ``[N, V]`` in any float type; not changed.
        largest: ``[N]``, the largest of each row.
        sampled: which rows, and how.

    Returns:
        int64 ``[R]``; an arbitrary token for a row whose largest logit is not finite.
    """
    bits = sampled.keys.bits(logits.device)
    parts = []
    for part in _slices(sampled, logits.shape[1]):
        scores = _scores(logits, largest, sampled, part)
        if sampled.filters is None:
            ids = torch.arange(scores.shape[1], device=scores.device)
            parts.append(scores.add_(gumbel(bits[part], ids)).argmax(dim=-1))
            continue
        width = max(sampled.filters.widest_k + 1, _CANDIDATES)
        parts.append(_draw_filtered(scores, sampled.filters.of(part), bits[part], width))
    return torch.cat(parts)


def weights(logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
    """Integer weights int64 ``[R, V]`` that :func:`draw` draws by; arguments as there."""
    vocab_size = logits.shape[1]
    parts = []
    for part in _slices(sampled, vocab_size):
        scores = _scores(logits, largest, sampled, part)
        if sampled.filters is None:
            parts.append(integer_weights(scores, vocab_size))
            continue
        ranking = rank(scores, sampled.filters.of(part), vocab_size)
        parts.append(torch.zeros_like(ranking.weights).scatter_(1, ranking.ids, ranking.weights))
    return torch.cat(parts)


def _slices(sampled: SampledRows, vocab_size: int) -> Iterator[slice]:
    """The rows in parts of bounded size."""
    step = _rows_of(sampled.rows.device, vocab_size)
    for start in range(0, sampled.rows.numel(), step):
        yield slice(start, start + step)


def _scores(logits: Tensor, largest: Tensor, sampled: SampledRows, part: slice) -> Tensor:
    """Float32 ``[R, V]`` of a part of the rows, at their temperatures.

    0 for the most likely token, and for every token of a row whose largest logit is not finite.
    """
    rows = sampled.rows[part]
    highest = largest[rows].float().unsqueeze(1)
    scores = logits[rows].float().sub_(highest).div_(sampled.temperature[part])
    return scores.masked_fill_(~torch.isfinite(highest), 0.0)


def rows_at_once(logits: Tensor) -> int:
    """How many rows of ``[N, V]`` to work on at a time."""
    return _rows_of(logits.device, logits.shape[1])


def _rows_of(device: torch.device, vocab_size: int) -> int:
    size = _SLICE_ELEMENTS.get(device.type, _SLICE_ELEMENTS_ELSEWHERE)
    return max(1, size // vocab_size)


def weight_shift(vocab_size: int) -> int:
    """The integer weight of a score of 0 is 2 to this."""
    return BITS - vocab_size.bit_length()


def integer_weights(scores: Tensor, vocab_size: int) -> Tensor:
    """Integer weights of scores whose row's largest is 0; overwrites the scores."""
    return scores.exp_().mul_(2.0 ** weight_shift(vocab_size)).to(torch.int64)


def _draw_filtered(scores: Tensor, filters: Filters, bits: Tensor, width: int) -> Tensor:
    """Draw among the ``width`` most likely tokens, and among more for rows that need it."""
    vocab_size = scores.shape[1]
    if width * 4 > vocab_size:  # sorting everything costs no more
        return rank(scores, filters, vocab_size).draw(bits)
    ranking = rank(scores, filters, width)
    tokens = ranking.draw(bits)
    if not bool(ranking.covered.all()):
        rest = (~ranking.covered).nonzero().squeeze(1)
        tokens[rest] = _draw_filtered(scores[rest], filters.of(rest), bits[rest], width * _WIDEN)
    return tokens


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The most likely tokens of each row after top-k, top-p and min-p.

    Attributes:
        ids: int64 ``[R, W]``, most likely first, of equals the lowest id first.
        scores: float32 ``[R, W]``, those of these tokens.
        weights: int64 ``[R, W]``, 0 for a token that was filtered out.
        covered: bool ``[R]``: no token beyond these ``W`` can be drawn.
    """

    ids: Tensor
    scores: Tensor
    weights: Tensor
    covered: Tensor

    def draw(self, bits: Tensor) -> Tensor:
        scores = self.scores.masked_fill(self.weights == 0, -math.inf)
        winner = scores.add_(gumbel(bits, self.ids)).argmax(dim=-1, keepdim=True)
        return self.ids.gather(1, winner).squeeze(1)


def rank(scores: Tensor, filters: Filters, width: int) -> _Ranking:
    """Rank the ``width`` most likely tokens, and filter them.

    Top-k keeps what is at least the k-th largest, so tokens that tie with it stay. Top-p keeps the
    shortest prefix of the ranking whose weight reaches ``top_p`` of what top-k kept. Min-p then
    compares with the most likely token, which all of them keep and whose score is 0.
    """
    vocab_size = scores.shape[1]
    values, ids = most_likely(scores, width)
    weights = integer_weights(values.clone(), vocab_size)
    limits_k = filters.top_k > 0
    kth = values.gather(1, (filters.top_k.clamp(1, width) - 1).unsqueeze(1))
    outside = limits_k.unsqueeze(1) & (values < kth)
    weights.masked_fill_(outside, 0)
    through = weights.cumsum(dim=-1)
    total = through[:, -1]
    if filters.any_without_k and width < vocab_size:
        total = torch.where(
            limits_k, total, integer_weights(scores.clone(), vocab_size).sum(dim=-1)
        )
    # Below 2**62 a float64 is exact to 2**9: enough to place top_p, not to keep the whole.
    share = (total.double() * filters.top_p).ceil().to(torch.int64)
    reach = torch.where(filters.top_p < 1, share, total)
    kept = through - weights < reach.unsqueeze(1)
    cut = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    # The last value seen may tie with tokens that were not: only what is above it is known whole.
    edge = torch.where(limits_k, kth.squeeze(1), cut.squeeze(1)) > values[:, -1]
    covered = edge & (through[:, -1] >= reach)
    if filters.log_min_p is not None:
        kept &= values >= filters.log_min_p.unsqueeze(1)
        # Without top-k the whole that top-p is a share of is known, whatever was not looked at.
        covered |= ~limits_k & (values[:, -1] < filters.log_min_p)
    return _Ranking(ids, values, weights.masked_fill_(~kept, 0), covered)


def most_likely(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Scores and ids ``[R, width]``, largest first, of equals the lowest id first."""
    if width == scores.shape[1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(width, dim=-1).indices.sort(dim=-1).values  # topk leaves ties in any order
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)

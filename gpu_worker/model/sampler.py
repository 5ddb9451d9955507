"""From logits to tokens, for the whole batch at once.

Greedy rows take the first of the largest logits. The others go through temperature, top-k, top-p
and min-p, in this order (that of transformers' ``generate``), and are picked by inverting the
cumulative distribution at a counter-based random number.

Probabilities are held as **integers**: ``trunc(exp((logit - largest) / temperature) * 2**s)``, with
``s`` the largest shift for which a row's sum fits into 62 bits (44 for a vocabulary of 2**18).
Integer sums do not depend on the order of summation, so a row's token depends on that row alone,
not on how a device splits a scan over the batch. There is no rounding to argue about at the ends
either: the random number becomes an integer ``t`` in ``[0, sum)`` by one exact product, and the
first token whose cumulative sum exceeds ``t`` is taken. That token has a positive weight, so one
that was filtered out can never be picked, and for the largest ``t`` there always is one. The price
is that a token less likely than ``2**-s`` times the most likely one is never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.shared.protocol import SamplingOptions

from .random_numbers import BITS, scaled_draw, uniform_bits

__all__ = ["INVALID_TOKEN", "Sampleable", "Sampler", "SamplingBatch"]

INVALID_TOKEN = -1
"""Given for a row that has no distribution: a NaN, an infinite logit, or all of them -inf."""

_CANDIDATES = 256
"""Most likely tokens looked at first for top-p; rows they do not cover are looked at again."""

_WIDEN = 16

_SLICE_ELEMENTS = {"cpu": 1 << 16}
_SLICE_ELEMENTS_ELSEWHERE = 1 << 24
"""Logits drawn from at a time. On a CPU the int64 temporaries stay in a core's second-level cache
(4 times faster than whole batches at 32 rows of 150,000); elsewhere it bounds them to 128 MiB each.
"""

_SMALLEST = torch.finfo(torch.float32).tiny


class Sampleable(Protocol):
    """What the sampler reads of a sequence."""

    @property
    def options(self) -> SamplingOptions:
        """All but what ends the output is used."""

    @property
    def seed(self) -> int:
        """The seed in force, in ``[0, 2**63)``."""

    @property
    def num_output_tokens(self) -> int:
        """Index of the token that is to be drawn."""


@dataclass(frozen=True, slots=True)
class _Filters:
    """Top-k, top-p and min-p of ``R`` rows, each of which has at least one of them.

    Attributes:
        top_k: int64 ``[R]``, 0 for all.
        top_p: float64 ``[R]``, 1 for all.
        log_min_p: float32 ``[R]``, -inf for all; None if it is so in every row.
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
    ) -> _Filters | None:
        if not any(map(_narrows, options)):
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

    def of(self, rows: Tensor | slice) -> _Filters:
        log_min_p = None if self.log_min_p is None else self.log_min_p[rows]
        return _Filters(
            self.top_k[rows], self.top_p[rows], log_min_p, self.widest_k, self.any_without_k
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn the same way; ``R`` of them.

    Attributes:
        rows: int64 ``[R]``, positions in the batch.
        temperature: float32 ``[R, 1]``, positive.
        filters: None if no row has top-k, top-p or min-p.
        bits: int64 ``[R]``, this step's random bits.
    """

    rows: Tensor
    temperature: Tensor
    filters: _Filters | None
    bits: Tensor

    def slices(self, vocab_size: int) -> Iterator[_Group]:
        """The group in parts of bounded size."""
        size = _SLICE_ELEMENTS.get(self.rows.device.type, _SLICE_ELEMENTS_ELSEWHERE)
        step = max(1, size // vocab_size)
        for start in range(0, self.rows.numel(), step):
            part = slice(start, start + step)
            filters = None if self.filters is None else self.filters.of(part)
            yield _Group(self.rows[part], self.temperature[part], filters, self.bits[part])


@dataclass(frozen=True, slots=True)
class _Members:
    """What stays the same of a group while the batch keeps its sequences.

    Attributes:
        sequences: the group's ``R`` sequences.
        seeds: int64 ``[R]``, on the host.
        group: all but the random bits.
    """

    sequences: tuple[Sampleable, ...]
    seeds: Tensor
    group: _Group

    @classmethod
    def of(cls, rows: list[int], sequences: Sequence[Sampleable], device: torch.device) -> _Members:
        mine = tuple(sequences[row] for row in rows)
        options = [sequence.options for sequence in mine]
        # The division must stay defined for temperatures that float32 cannot hold; at the smallest
        # one that it can, every token but the most likely has weight 0 already.
        temperature = [max(option.temperature, _SMALLEST) for option in options]
        seeds = torch.tensor([sequence.seed for sequence in mine])
        group = _Group(
            torch.tensor(rows, device=device),
            torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1),
            _Filters.from_options(options, device),
            bits=torch.empty_like(seeds),
        )
        return cls(mine, seeds, group)

    def draw(self) -> _Group:
        """The group with the random bits of each sequence's next token."""
        indexes = torch.tensor([sequence.num_output_tokens for sequence in self.sequences])
        # Drawn on the host, where the indexes are: a step sends one small tensor to the device.
        bits = uniform_bits(self.seeds, torch.zeros_like(indexes), indexes)
        return replace(self.group, bits=bits.to(self.group.rows.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of a step's logits becomes a token.

    Attributes:
        sequences: one per row, in order.
        device: where the logits are.
        members: the rows that are not greedy, by the work they need; empty for an all-greedy batch.
        groups: the same with this step's random numbers.
    """

    sequences: tuple[Sampleable, ...]
    device: torch.device
    members: tuple[_Members, ...]
    groups: tuple[_Group, ...]

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sampleable],
        device: torch.device | str,
        previous: SamplingBatch | None = None,
    ) -> SamplingBatch:
        """The batch for one step.

        Args:
            sequences: the sequence of each row of logits.
            device: where the logits are.
            previous: the batch of the step before. Its tensors are used again if it has the same
                sequences in the same order; only the random numbers are drawn anew.
        """
        device = torch.device(device)
        same = previous is not None and previous.is_of(sequences, device)
        members = previous.members if previous is not None and same else _members(sequences, device)
        return cls(tuple(sequences), device, members, tuple(member.draw() for member in members))

    def is_of(self, sequences: Sequence[Sampleable], device: torch.device) -> bool:
        """Whether the batch is of these very sequences in this order, on this device."""
        return (
            len(sequences) == len(self.sequences)
            and device == self.device
            and all(a is b for a, b in zip(sequences, self.sequences, strict=True))
        )


def _members(sequences: Sequence[Sampleable], device: torch.device) -> tuple[_Members, ...]:
    plain: list[int] = []
    filtered: list[int] = []
    for row, sequence in enumerate(sequences):
        if sequence.options.temperature > 0:
            (filtered if _narrows(sequence.options) else plain).append(row)
    return tuple(_Members.of(rows, sequences, device) for rows in (plain, filtered) if rows)


def _narrows(options: SamplingOptions) -> bool:
    return options.top_k > 0 or options.top_p < 1 or options.min_p > 0


class Sampler:
    """Picks one token per row of logits."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """The token of each row.

        Args:
            logits: ``[N, V]`` in any float type; not changed.
            batch: its ``N`` rows.

        Returns:
            int64 ``[N]``; :data:`INVALID_TOKEN` for a row without a distribution, which says
            nothing about the other rows.

        Raises:
            ValueError: the batch is for another number of rows.
        """
        if logits.shape[0] != len(batch.sequences):
            raise ValueError(f"{logits.shape[0]} rows of logits, {len(batch.sequences)} sequences")
        largest, tokens = logits.max(dim=-1)  # NaN is larger than everything here
        valid = torch.isfinite(largest)
        for group in batch.groups:
            for part in group.slices(logits.shape[1]):
                tokens[part.rows] = _draw(logits, largest, valid, part)
        return tokens.masked_fill_(~valid, INVALID_TOKEN)


def _draw(logits: Tensor, largest: Tensor, valid: Tensor, group: _Group) -> Tensor:
    """Tokens int64 ``[R]`` of the group's rows; any token for a row that is not valid."""
    rows = group.rows
    scores = logits[rows].float()
    scores.sub_(largest[rows].float().unsqueeze(1)).div_(group.temperature)
    scores.masked_fill_(~valid[rows].unsqueeze(1), 0.0)
    if group.filters is None:
        return _invert(_weights(scores, scores.shape[1]), group.bits)
    width = max(group.filters.widest_k + 1, _CANDIDATES)
    return _draw_filtered(scores, group.filters, group.bits, width)


def _weights(scores: Tensor, vocab_size: int) -> Tensor:
    """Integer weights of scores whose row's largest is 0; the scores are used up."""
    shift = BITS - vocab_size.bit_length()
    return scores.exp_().mul_(2.0**shift).to(torch.int64)


def _invert(weights: Tensor, bits: Tensor) -> Tensor:
    """The position ``[R]`` in which each row's draw falls, by the weights ``[R, W]``."""
    cumulative = weights.cumsum(dim=-1)
    target = scaled_draw(bits, cumulative[:, -1])
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def _draw_filtered(scores: Tensor, filters: _Filters, bits: Tensor, width: int) -> Tensor:
    """Draws among the ``width`` most likely tokens, and more of them for rows that need it."""
    vocab_size = scores.shape[1]
    if width * 4 > vocab_size:  # sorting everything costs no more
        return _rank(scores, filters, vocab_size).draw(bits)
    ranking = _rank(scores, filters, width)
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
        weights: int64 ``[R, W]``, 0 for a token that was filtered out.
        covered: bool ``[R]``: no token beyond these ``W`` has a say.
    """

    ids: Tensor
    weights: Tensor
    covered: Tensor

    def draw(self, bits: Tensor) -> Tensor:
        return self.ids.gather(1, _invert(self.weights, bits).unsqueeze(1)).squeeze(1)


def _rank(scores: Tensor, filters: _Filters, width: int) -> _Ranking:
    """Ranks the ``width`` most likely tokens and filters them.

    Top-k keeps what is at least the k-th largest, so tokens that tie with it stay. Top-p keeps the
    shortest prefix of the ranking whose weight reaches ``top_p`` of what top-k left. Min-p then
    compares with the most likely token, which all of them keep and whose score is 0.
    """
    vocab_size = scores.shape[1]
    values, ids = _most_likely(scores, width)
    weights = _weights(values.clone(), vocab_size)
    limits_k = filters.top_k > 0
    kth = values.gather(1, (filters.top_k.clamp(1, width) - 1).unsqueeze(1))
    outside = limits_k.unsqueeze(1) & (values < kth)
    weights.masked_fill_(outside, 0)
    through = weights.cumsum(dim=-1)
    total = through[:, -1]
    if filters.any_without_k and width < vocab_size:
        total = torch.where(limits_k, total, _weights(scores.clone(), vocab_size).sum(dim=-1))
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
    return _Ranking(ids, weights.masked_fill_(~kept, 0), covered)


def _most_likely(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Scores and ids ``[R, width]``, largest first, of equals the lowest id first."""
    if width == scores.shape[1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(width, dim=-1).indices.sort(dim=-1).values  # topk leaves ties in any order
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)

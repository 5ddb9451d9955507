"""From logits to tokens, for the whole batch at once.

Greedy rows take the first of the largest logits. The others apply temperature, top-k, top-p and
min-p, in this order (that of transformers' ``generate``), and draw a token with counter-based
random numbers (:mod:`.gumbel_sampling`). Rows with penalties, biases or forbidden tokens have a
matrix of their own, which :mod:`.logits_processors` fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from operator import is_
from typing import Protocol

import torch
from torch import Tensor

from .beam_candidates import CandidateRows, CandidateTokens
from .gumbel_sampling import Filters, SampledRows, largest, narrows, weights
from .logits_processors import LogitsProcessors, Processable, processes
from .logprobs import LogprobRows, Logprobs
from .random_numbers import DrawKeys
from .row_operations import RowOperations, TorchRows

__all__ = [
    "INVALID_TOKEN", "NO_TOKEN_LEFT", "Sampleable", "Sampler", "SamplingBatch", "takes_largest",
]  # fmt: skip

INVALID_TOKEN = -1
"""For a row without a distribution: a NaN, an infinite logit, or only -inf."""

NO_TOKEN_LEFT = -2
"""For a row whose options forbid every token of its distribution."""

_SMALLEST = torch.finfo(torch.float32).tiny


class Sampleable(Processable, Protocol):
    """What the sampler reads of a sequence."""

    @property
    def seed(self) -> int:
        """The seed in force, in ``[0, 2**63)``."""

    @property
    def choice(self) -> int:
        """Which of its request's outputs it is."""

    @property
    def num_candidates(self) -> int:
        """How many of the most likely next tokens beam search asks for; 0: none."""


def takes_largest(sequence: Sampleable) -> bool:
    """Whether the first of its largest logits is all that is asked of them."""
    options = sequence.options
    return (
        options.temperature <= 0
        and options.logprobs is None
        and not sequence.num_candidates
        and not processes(options)
    )


@dataclass(frozen=True, slots=True)
class _RowSampler:
    """What sampled rows keep while the batch keeps its sequences.

    Attributes:
        sequences: ``R`` sequences.
        sampled: the rows, as of the first token of each output.
    """

    sequences: tuple[Sampleable, ...]
    sampled: SampledRows

    @classmethod
    def of(
        cls, rows: list[int], sequences: Sequence[Sampleable], device: torch.device, stream: int
    ) -> _RowSampler:
        mine = tuple(sequences[row] for row in rows)
        options = [sequence.options for sequence in mine]
        # Keeps the division defined for temperatures that float32 cannot hold. At the smallest that
        # it can hold, every token but the most likely already has weight 0.
        temperature = [max(option.temperature, _SMALLEST) for option in options]
        seeds = torch.tensor([sequence.seed for sequence in mine])
        choices = torch.tensor([sequence.choice for sequence in mine])
        sampled = SampledRows(
            torch.tensor(rows, device=device),
            torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1),
            Filters.from_options(options, device),
            DrawKeys(seeds, choices, torch.zeros_like(seeds), stream),
        )
        return cls(mine, sampled)

    def draw(self) -> SampledRows:
        """The rows with the random numbers of each sequence's next token."""
        indexes = torch.tensor([sequence.num_output_tokens for sequence in self.sequences])
        return replace(self.sampled, keys=replace(self.sampled.keys, indexes=indexes))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of a step's logits becomes a token.

    Attributes:
        sequences: one per row, in order.
        device: where the logits are.
        samplers: the rows that are not greedy, by the work they need; empty if all are greedy.
        sampled: the same with this step's random numbers.
        processed: the rows whose logits are changed first, not in ``sampled``; None without any.
        reported: the rows whose log-probabilities are asked for; None without any.
        beams: the rows whose candidates are asked for; None without any.
    """

    sequences: tuple[Sampleable, ...]
    device: torch.device
    samplers: tuple[_RowSampler, ...]
    sampled: tuple[SampledRows, ...]
    processed: _Processed | None
    reported: LogprobRows | None
    beams: CandidateRows | None

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sampleable],
        device: torch.device | str,
        previous: SamplingBatch | None = None,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        stream: int = 0,
    ) -> SamplingBatch:
        """The batch for one step.

        Args:
            sequences: the sequence of each row of logits.
            device: where the logits are.
            previous: the batch of the step before. Its tensors are used again if it has the same
                sequences in the same order; only the random numbers are drawn anew.
            eos_token_ids: ids that end an output, unless its request ignores them.
            stream: which of a token's random numbers to draw with; the same as ``previous``.
        """
        device = torch.device(device)
        if previous is not None and previous.is_of(sequences, device):
            if not previous.samplers and previous.processed is None:
                return previous  # nothing is drawn
            samplers, processed, reported = previous.samplers, previous.processed, previous.reported
            beams = previous.beams
            if processed is not None:
                processed = replace(processed, sampled=_draws(processed.samplers))
        else:
            samplers = _row_samplers(sequences, device, stream, processes_too=False)
            before = None if previous is None else previous.processed
            processed = _Processed.of(sequences, device, eos_token_ids, before, stream)
            reported = LogprobRows.of([sequence.options for sequence in sequences], device)
            beams = CandidateRows.of(sequences, device, eos_token_ids)
        draws = _draws(samplers)
        return cls(tuple(sequences), device, samplers, draws, processed, reported, beams)

    def is_of(self, sequences: Sequence[Sampleable], device: torch.device) -> bool:
        """Whether the batch is of these very sequences in this order, on this device."""
        return (
            len(sequences) == len(self.sequences)
            and device == self.device
            and all(map(is_, sequences, self.sequences))
        )


@dataclass(frozen=True, slots=True)
class _Processed:
    """Rows whose logits are changed before temperature; ``P`` of them.

    Attributes:
        rows: int64 ``[P]``, positions in the batch.
        processors: what changes them.
        samplers: as of a batch of these rows alone.
        sampled: the same with this step's random numbers.
    """

    rows: Tensor
    processors: LogitsProcessors
    samplers: tuple[_RowSampler, ...]
    sampled: tuple[SampledRows, ...]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sampleable],
        device: torch.device,
        eos_token_ids: frozenset[int],
        previous: _Processed | None,
        stream: int,
    ) -> _Processed | None:
        rows = [row for row, sequence in enumerate(sequences) if processes(sequence.options)]
        if not rows:
            return None
        mine = [sequences[row] for row in rows]
        before = None if previous is None else previous.processors.history
        processors = LogitsProcessors(mine, device, eos_token_ids, before)
        samplers = _row_samplers(mine, device, stream, processes_too=True)
        return cls(torch.tensor(rows, device=device), processors, samplers, _draws(samplers))


def _draws(samplers: tuple[_RowSampler, ...]) -> tuple[SampledRows, ...]:
    return tuple(sampler.draw() for sampler in samplers)


def _row_samplers(
    sequences: Sequence[Sampleable], device: torch.device, stream: int, *, processes_too: bool
) -> tuple[_RowSampler, ...]:
    plain: list[int] = []
    filtered: list[int] = []
    for row, sequence in enumerate(sequences):
        options = sequence.options
        drawn = options.temperature > 0 and not sequence.num_candidates
        if drawn and (processes_too or not processes(options)):
            (filtered if narrows(options) else plain).append(row)
    return tuple(
        _RowSampler.of(rows, sequences, device, stream) for rows in (plain, filtered) if rows
    )


class Sampler:
    """Picks one token per row of logits.

    Args:
        operations: what computes over whole rows of logits; None: PyTorch.
    """

    def __init__(self, operations: RowOperations | None = None) -> None:
        self._operations = TorchRows() if operations is None else operations

    def sample(self, logits: Tensor, batch: SamplingBatch, masks: Sequence[Tensor] = ()) -> Tensor:
        """The token of each row.

        Args:
            logits: ``[N, V]`` in any float type; not changed. Without columns if all rows
                :func:`takes_largest` and the operations know their largest.
            batch: its ``N`` rows.
            masks: what may follow in each constrained row, see :class:`LogitsProcessors`.

        Returns:
            int64 ``[N]``; :data:`INVALID_TOKEN` for a row without a distribution,
            :data:`NO_TOKEN_LEFT` for one whose options forbid all tokens. Neither says anything
            about the other rows.

        Raises:
            ValueError: the batch is for another number of rows.
        """
        if logits.shape[0] != len(batch.sequences):
            raise ValueError(f"{logits.shape[0]} rows of logits, {len(batch.sequences)} sequences")
        tokens = self._pick(logits, batch.sampled)
        if (processed := batch.processed) is not None:
            rows = processed.rows
            scores = processed.processors.apply(logits[rows], self._operations, masks)
            picked = self._pick(scores, processed.sampled)
            picked.masked_fill_(picked == INVALID_TOKEN, NO_TOKEN_LEFT)
            # A model's NaN stays one, even if its token was forbidden.
            tokens[rows] = picked.masked_fill_(tokens[rows] == INVALID_TOKEN, INVALID_TOKEN)
        return tokens

    def most_likely(self, logits: Tensor) -> list[int]:
        """What :meth:`sample` gives where all rows :func:`takes_largest`, as a list."""
        values, tokens = self._operations.largest_as_lists(logits)
        if all(map(isfinite, values)):
            return tokens
        return [
            token if isfinite(value) else INVALID_TOKEN
            for token, value in zip(tokens, values, strict=True)
        ]

    def probabilities(
        self, logits: Tensor, batch: SamplingBatch, masks: Sequence[Tensor] = ()
    ) -> Tensor:
        """What :meth:`sample` draws from, all options applied: float64 ``[N, V]``.

        The most likely token alone in a greedy row; anything in a row without a distribution.
        """
        table = _weights(logits, batch.sampled)
        if (processed := batch.processed) is not None:
            scores = processed.processors.apply(logits[processed.rows], self._operations, masks)
            table[processed.rows] = _weights(scores, processed.sampled)
        return table / table.sum(dim=-1, keepdim=True)

    def report(self, logits: Tensor, batch: SamplingBatch, tokens: Tensor) -> Logprobs | None:
        """The log-probabilities of what :meth:`sample` gave, where they are asked for."""
        if batch.reported is None:
            return None
        return batch.reported.compute(logits, tokens, self._operations)

    def candidates(self, logits: Tensor, batch: SamplingBatch) -> CandidateTokens | None:
        """The most likely tokens of the rows that are beams."""
        return None if batch.beams is None else batch.beams.compute(logits, self._operations)

    def _pick(self, logits: Tensor, sampled: Sequence[SampledRows]) -> Tensor:
        """Tokens int64 ``[N]``: drawn in the sampled rows, the most likely in all others."""
        highest, tokens = self._operations.largest(logits)  # NaN is larger than everything here
        for rows in sampled:
            tokens[rows.rows] = self._operations.draw(logits, highest, rows)
        if highest.device.type == "cpu" and all(map(isfinite, highest.tolist())):
            return tokens  # the usual step: each operation on tensors would cost it microseconds
        return tokens.masked_fill_(~torch.isfinite(highest), INVALID_TOKEN)


def _weights(logits: Tensor, sampled: Sequence[SampledRows]) -> Tensor:
    """Float64 ``[N, V]``: integer weights of sampled rows; else of the largest logit alone."""
    highest, tokens = largest(logits)
    result = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    result.scatter_(1, tokens.unsqueeze(1), 1.0)
    for rows in sampled:
        result[rows.rows] = weights(logits, highest, rows).double()
    return result

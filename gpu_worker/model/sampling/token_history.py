"""Counts the tokens of sequences, for penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["TokenHistory", "Tokens"]


class Tokens(Protocol):
    """The tokens of a sequence: more may be appended, and none ever changes."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them are the prompt."""


class TokenHistory:
    """The tokens of ``H`` sequences, counted.

    The counts are a function of the token ids alone, so they are the same after a preemption or on
    another worker. To save work, each step only adds the tokens since the last one.

    Args:
        sequences: whose tokens.
        device: where the counts are kept.
        previous: the history of an earlier batch; its counts of the same sequences are reused.
    """

    def __init__(
        self,
        sequences: Sequence[Tokens],
        device: torch.device,
        previous: TokenHistory | None = None,
    ) -> None:
        self._sequences = tuple(sequences)
        self._device = device
        self._counted = [0] * len(self._sequences)
        self._places: Tensor | None = None
        self._table: Tensor | None = None
        if previous is not None:
            self._table, self._counted = previous.hand_over(self._sequences)

    def now(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """The counts now.

        Returns:
            The table, int32 ``[H, V]``, to be read before the next call, which changes it. Bit 0:
            the prompt has the token; the bits above it: how often the output has it. And where it
            is not 0: places in the flat table, int64 ``[M]``; each at least once.
        """
        if self._table is None or self._table.shape[1] != vocab_size:
            self._counted = [0] * len(self._sequences)
            self._table, self._places = self._empty(len(self._sequences), vocab_size), None
        fresh = self._catch_up(self._table)
        if self._places is None:  # found once per batch; later steps only append
            self._places = self._table.view(-1).nonzero().squeeze(1)
        elif fresh is not None:
            self._places = torch.cat((self._places, fresh))
        return self._table, self._places

    def hand_over(self, sequences: Sequence[Tokens]) -> tuple[Tensor | None, list[int]]:
        """A table for other sequences, and how many tokens of each it has counted.

        Unknown sequences start from zero. The table is None if all of them are unknown.
        """
        counted = [0] * len(sequences)
        known = {id(sequence): row for row, sequence in enumerate(self._sequences)}
        rows = [row for row, sequence in enumerate(sequences) if id(sequence) in known]
        if self._table is None or not rows:
            return None, counted
        sources = [known[id(sequences[row])] for row in rows]
        table = self._empty(len(sequences), self._table.shape[1])
        table[self._tensor(rows)] = self._table[self._tensor(sources)]
        for row, source in zip(rows, sources, strict=True):
            counted[row] = self._counted[source]
        return table, counted

    def _empty(self, rows: int, vocab_size: int) -> Tensor:
        return torch.zeros((rows, vocab_size), dtype=torch.int32, device=self._device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _catch_up(self, table: Tensor) -> Tensor | None:
        """Count new tokens; returns the places of new output tokens, if any."""
        vocab_size = table.shape[1]
        fresh: list[int] = []  # positions in the flat table
        for row, sequence in enumerate(self._sequences):
            begin, token_ids = self._counted[row], sequence.token_ids
            if begin == len(token_ids):
                continue
            if begin < sequence.num_prompt_tokens:
                begin = sequence.num_prompt_tokens
                prompt = self._tensor(token_ids[:begin])
                table[row].index_fill_(0, prompt, 1)
            fresh += [row * vocab_size + token_id for token_id in token_ids[begin:]]
        self._counted = [len(sequence.token_ids) for sequence in self._sequences]
        if not fresh:
            return None
        places = self._tensor(fresh)
        # Integers: the sum does not depend on the order in which a device adds.
        twos = torch.full_like(places, 2, dtype=table.dtype)
        table.view(-1).scatter_add_(0, places, twos)
        return places

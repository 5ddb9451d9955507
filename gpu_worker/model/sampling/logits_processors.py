"""Changes logits before temperature, as a request's options say.

The order of operations, here and in :mod:`.gumbel_sampling`, is that of transformers' ``generate``:

1. ``logit_bias`` is added (``SequenceBiasLogitsProcessor``),
2. ``repetition_penalty`` divides what is positive and multiplies what is not, for tokens of prompt
   and output (``RepetitionPenaltyLogitsProcessor``; Keskar et al., 2019, "CTRL"),
3. ``frequency_penalty`` times the token's count in the output and ``presence_penalty`` once, if it
   is in the output, are subtracted (not in transformers; as OpenAI defines them),
4. ``banned_token_ids`` (``NoBadWordsLogitsProcessor``), the ids that would end the output before it
   has ``min_tokens`` (``MinNewTokensLengthLogitsProcessor``), and all but ``allowed_token_ids``
   (``PrefixConstrainedLogitsProcessor``) become -inf, and so do the ids that the constraint
   (``json_schema``, ``regex``, ``grammar``, ``choice``) forbids,
5. temperature, 6. top-k, 7. top-p, 8. min-p; or, for temperature 0, the largest.

Every operation works element by element in float32, so a row's values depend on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason

from ...engine.requests.engine_request import Finish
from ..drafting.draft_rows import DraftRow, base_of
from .row_operations import RowOperations
from .token_history import TokenHistory, Tokens

__all__ = ["LogitsProcessors", "Processable", "nothing_left", "processes"]


class Processable(Tokens, Protocol):
    """A sequence, as far as processors read it."""

    @property
    def options(self) -> SamplingOptions:
        """Its request's options."""

    @property
    def num_output_tokens(self) -> int:
        """Index of the token to be chosen."""


def processes(options: SamplingOptions) -> bool:
    """Whether logits must be changed before temperature."""
    return _penalises(options) or bool(
        options.logit_bias
        or options.banned_token_ids
        or options.allowed_token_ids
        or options.min_tokens
        or options.constraint
    )


def nothing_left(options: SamplingOptions) -> Finish:
    """The end of a request whose options, taken together, forbid every token."""
    names = ("constraint", "allowed_token_ids", "banned_token_ids", "min_tokens")
    values = {name: getattr(options, name) for name in names}
    named = [options.constraint or "" if n == "constraint" else n for n in names if values[n]]
    message = f"{', '.join(named)}: together they allow no token here; loosen one of them"
    return Finish(Reason.INVALID, message)


def _penalises(options: SamplingOptions) -> bool:
    return (
        options.repetition_penalty != 1
        or options.presence_penalty != 0
        or options.frequency_penalty != 0
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Single logits, each at most once: token ``ids[i]`` of row ``rows[i]``."""

    rows: Tensor
    ids: Tensor

    @classmethod
    def of(cls, ids_of_rows: Iterable[tuple[int, Iterable[int]]], device: torch.device) -> _Places:
        pairs = [(row, token_id) for row, ids in ids_of_rows for token_id in set(ids)]
        rows = torch.tensor([row for row, _ in pairs], dtype=torch.int64, device=device)
        ids = torch.tensor([token_id for _, token_id in pairs], dtype=torch.int64, device=device)
        return cls(rows, ids)

    def mask(self, scores: Tensor) -> None:
        scores[self.rows, self.ids] = -math.inf


class LogitsProcessors:
    """The processors of ``P`` rows. The tensors are made once for all steps of these rows.

    Args:
        sequences: one per row.
        device: where the logits are.
        eos_token_ids: ids that end an output, unless its request ignores them.
        previous: the history of an earlier batch, whose token counts are reused.

    Attributes:
        history: the tokens of the rows that have penalties.
        constrained: int64 ``[C]``, the rows whose output has a constraint.
    """

    def __init__(
        self,
        sequences: Sequence[Processable],
        device: torch.device,
        eos_token_ids: frozenset[int] = frozenset(),
        previous: TokenHistory | None = None,
    ) -> None:
        self._device = device
        self._sequences = tuple(sequences)
        self._eos_token_ids = eos_token_ids
        self._bias = self._biases()
        counted = self._rows(_penalises)
        # Rows of one sequence, between its drafts, share what was counted of it.
        owners = [base_of(sequences[row]) for row in counted]
        bases = {id(base): base for base in owners}
        self.history = TokenHistory(list(bases.values()), device, previous)
        slots = {key: slot for slot, key in enumerate(bases)}
        self._slots = [slots[id(base)] for base in owners]
        self._drafted = [
            (slot, row)
            for slot, index in enumerate(counted)
            if isinstance(row := sequences[index], DraftRow)
        ]
        self._counted = self._tensor(counted) if counted else None
        self._repetition = self._penalties(counted, "repetition_penalty")
        self._frequency = self._penalties(counted, "frequency_penalty")
        self._presence = self._penalties(counted, "presence_penalty")
        self._banned = self._places("banned_token_ids")
        self._allowed = self._places("allowed_token_ids")
        self._restricted = self._tensor(self._rows(lambda o: bool(o.allowed_token_ids)))
        self.constrained = self._tensor(self._rows(lambda o: o.constraint is not None))
        self._kept_open = self._rows(lambda o: o.min_tokens > 0)
        self._open_now: list[int] = []
        self._ending: _Places | None = None

    def apply(
        self, logits: Tensor, operations: RowOperations, masks: Sequence[Tensor] = ()
    ) -> Tensor:
        """The logits to which temperature and filters apply.

        Args:
            logits: ``[P, V]`` in any float type; float32 is changed in place.
            operations: what computes over whole rows.
            masks: on the host, int32 ``[words]`` of each constrained row in order. Bit ``i % 32``
                of word ``i // 32`` tells whether token ``i`` may come next.

        Returns:
            float32 ``[P, V]``.
        """
        scores = logits.float()
        if self._bias is not None:
            places, bias = self._bias
            scores[places.rows, places.ids] += bias
        if self._counted is not None:
            self._penalise(scores, self._counted)
        if self._banned is not None:
            self._banned.mask(scores)
        ending = self._ends_too_early()
        if ending is not None:
            ending.mask(scores)
        if self._allowed is not None:
            kept = scores[self._allowed.rows, self._allowed.ids]
            scores.index_fill_(0, self._restricted, -math.inf)
            scores[self._allowed.rows, self._allowed.ids] = kept
        if self.constrained.numel():
            operations.forbid(scores, self.constrained, torch.stack(tuple(masks)))
        return scores

    def _penalise(self, scores: Tensor, counted: Tensor) -> None:
        """Change only the tokens that have occurred, a thousandth of a large vocabulary."""
        vocab_size = scores.shape[1]
        table, places = self.history.now(vocab_size)
        if self._drafted:
            table, places = self._count_drafts(table)
        slots, ids = places // vocab_size, places % vocab_size
        rows = counted[slots]
        values, repetition = scores[rows, ids], self._repetition[slots]
        values = torch.where(values < 0, values * repetition, values / repetition)
        counts = table.view(-1)[places] >> 1
        values -= counts * self._frequency[slots]
        values -= (counts > 0) * self._presence[slots]
        # A place that occurs twice gets the same value twice.
        scores[rows, ids] = values

    def _count_drafts(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """The counts of each row and the drafts before it: a table of their own, and its places."""
        vocab_size = table.shape[1]
        table = table[self._tensor(self._slots)]
        fresh = [
            slot * vocab_size + token_id
            for slot, row in self._drafted
            for token_id in row.drafts[: row.offset]
        ]
        places = self._tensor(fresh)
        table.view(-1).scatter_add_(0, places, torch.full_like(places, 2, dtype=table.dtype))
        return table, table.view(-1).nonzero().squeeze(1)

    def _ends_too_early(self) -> _Places | None:
        """Ids that may not come yet; recomputed only when a row reaches its ``min_tokens``."""
        if not self._kept_open:
            return None
        too_short = [
            row
            for row in self._kept_open
            if self._sequences[row].num_output_tokens < self._sequences[row].options.min_tokens
        ]
        if too_short != self._open_now:
            ending = [(row, self._sequences[row].options) for row in too_short]
            ids = [(row, options.ending_ids(self._eos_token_ids)) for row, options in ending]
            self._ending = _Places.of(ids, self._device) if ids else None
            self._open_now = too_short
        return self._ending

    def _rows(self, has: Callable[[SamplingOptions], bool]) -> list[int]:
        return [row for row, sequence in enumerate(self._sequences) if has(sequence.options)]

    def _tensor(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _places(self, field: str) -> _Places | None:
        lists = [(r, getattr(s.options, field)) for r, s in enumerate(self._sequences)]
        return _Places.of(lists, self._device) if any(ids for _, ids in lists) else None

    def _biases(self) -> tuple[_Places, Tensor] | None:
        maps = [(row, s.options.logit_bias or {}) for row, s in enumerate(self._sequences)]
        if not any(bias for _, bias in maps):
            return None
        pairs = [(row, token_id, bias) for row, of in maps for token_id, bias in of.items()]
        rows, ids, values = zip(*pairs, strict=True)
        places = _Places(self._tensor(list(rows)), self._tensor(list(ids)))
        return places, torch.tensor(values, dtype=torch.float32, device=self._device)

    def _penalties(self, rows: list[int], field: str) -> Tensor:
        values = [getattr(self._sequences[row].options, field) for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=self._device)

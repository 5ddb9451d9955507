"""Proposes drafts on the device: the draft model, and the interface that other drafters share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..engine.plan import BlockCopy, Span
from ..engine.sequence import Sequence, SequenceStatus
from .draft_rows import DraftRows, SampledRow
from .kv_pool import KVPool
from .packing import Piece, Rows, decode_pieces, forward_logits, pack
from .sampler import Sampler, SamplingBatch
from .timing import least_seconds

if TYPE_CHECKING:
    from .loader import LoadedModel

__all__ = ["DraftModel", "Drafter"]

_CATCH_UP = 512
"""Most tokens of one sequence that the draft model reads in one step. One that is further behind
reads on in the next steps, and has no drafts meanwhile."""


class Drafter(Protocol):
    """Something that proposes tokens on the model's side.

    What it proposes costs or saves time and never changes an output. A head that reads the target's
    hidden states (Medusa, EAGLE, multi-token prediction) would be one more of these.
    """

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """What happens to the target's blocks before the step; without KV there is nothing to do.

        Args:
            copies: as in a plan.
        """

    def propose(self, spans: Seq[Span]) -> list[tuple[int, ...]]:
        """Drafts for spans whose last token is the sequence's last.

        Args:
            spans: each asks for ``num_drafts``, and its sequence's blocks have room for them.

        Returns:
            For each span ``num_drafts`` tokens, or none.
        """


@dataclass(slots=True)
class _Known:
    """How far the draft model has read a sequence.

    Attributes:
        num_read: tokens of the sequence whose KV it had stored when it last proposed.
        drafts: what it proposed behind them and has stored, too.
        num_preemptions: of the sequence at that time.
    """

    num_read: int
    drafts: tuple[int, ...]
    num_preemptions: int


class DraftModel:
    """A small model with the target's vocabulary.

    Its KV lies in tensors of its own, in the same blocks at the same offsets as the target's: what
    the engine does with a block (sharing, copying, giving it away) is done for both. KV it has not
    read, or that is another's, would cost acceptance and nothing else.

    Proposals are drawn with the target's own random numbers for the same places (common random
    numbers), after the same options: where the two distributions are alike, the two tokens are.

    Args:
        loaded: the model.
        pool: of its geometry, with as many blocks as the target's.
        sampler: picks the proposals.
        target: whose tokens are to be guessed; of the same tokenizer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        sampler: Sampler,
        target: LoadedModel,
    ) -> None:
        self.loaded = loaded
        self.pool = pool
        self._sampler = sampler
        self._eos_token_ids = target.eos_token_ids
        self._vocab_size = target.vocab_size
        self._known: dict[Sequence, _Known] = {}
        self._rows = DraftRows()
        self._batches: dict[int, SamplingBatch] = {}

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """See :class:`Drafter`; its own KV has the block numbers of the first KV kind."""
        self.pool.copy_blocks([copy for copy in copies if copy.kind == 0])

    def propose(self, spans: Seq[Span]) -> list[tuple[int, ...]]:
        """See :class:`Drafter`. A sequence that must be caught up with first has no drafts yet."""
        drafts: dict[Sequence, list[int]] = {}
        pieces: list[Piece] = []
        active: list[Span] = []
        for span in spans:
            sequence = span.sequence
            start, stop = self._num_read(sequence), len(sequence.token_ids)
            if stop + span.num_drafts > self.loaded.max_model_len:
                continue
            if stop - start > _CATCH_UP:
                stop = start + _CATCH_UP
                self._read([Piece(sequence.token_ids[start:stop], start, sequence.block_table)])
                self._known[sequence] = _Known(stop, (), sequence.num_preemptions)
                continue
            pieces.append(Piece(sequence.token_ids[start:], start, sequence.block_table, Rows.LAST))
            active.append(span)
        for span in active:
            drafts[span.sequence] = []
        offset = 0
        while active:
            tokens = self._draw(pieces, active, drafts, offset)
            for span, token in zip(active, tokens, strict=True):
                drafts[span.sequence].append(token)
            offset += 1
            active = [
                span
                for span in active
                if span.num_drafts > offset and drafts[span.sequence][-1] >= 0
            ]
            pieces = [_one(span.sequence, drafts[span.sequence]) for span in active]
        self._remember(spans, drafts)
        return [tuple(t for t in drafts.get(span.sequence, ()) if t >= 0) for span in spans]

    @torch.inference_mode()
    def time_round(self, num_sequences: int, *, repeats: int = 5) -> float:
        """Seconds in which it proposes one token for each of so many short sequences.

        It writes to its pool: call it before that holds anything.
        """
        return least_seconds(
            lambda: self._read(decode_pieces(self.pool, num_sequences)).argmax(-1), repeats
        )

    def _draw(
        self,
        pieces: list[Piece],
        spans: Seq[Span],
        drafts: dict[Sequence, list[int]],
        offset: int,
    ) -> list[int]:
        rows: list[SampledRow] = [
            self._rows.of(span.sequence, drafts[span.sequence])[offset] for span in spans
        ]
        batch = self._batches[offset] = SamplingBatch.from_sequences(
            rows,
            self.loaded.device,
            self._batches.get(offset),
            eos_token_ids=self._eos_token_ids,
        )
        return self._sampler.sample(self._fit(self._read(pieces)), batch).tolist()

    def _read(self, pieces: list[Piece]) -> torch.Tensor:
        step = pack(pieces, self.pool)
        return forward_logits(self.loaded.model, self.loaded.context, self.pool, step)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """As wide as the target's: output layers are padded beyond the tokens there are."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def _num_read(self, sequence: Sequence) -> int:
        """Tokens of a sequence whose KV are right: read ones, and drafts that became tokens."""
        known = self._known.get(sequence)
        if known is None or known.num_preemptions != sequence.num_preemptions:
            return 0
        count = known.num_read
        for token_id, draft in zip(sequence.token_ids[count:], known.drafts, strict=False):
            if token_id != draft:
                break
            count += 1
        return min(count, len(sequence.token_ids) - 1)  # the last one's logits are needed again

    def _remember(self, spans: Seq[Span], drafts: dict[Sequence, list[int]]) -> None:
        for span in spans:
            sequence = span.sequence
            proposed = drafts.get(sequence)
            if proposed is not None:
                # The last proposal was drawn and never read.
                self._known[sequence] = _Known(
                    len(sequence.token_ids), tuple(proposed[:-1]), sequence.num_preemptions
                )
        self._rows.keep([span.sequence for span in spans])
        if len(self._known) > 4 * len(spans) + 256:
            self._known = {
                s: k for s, k in self._known.items() if s.status is not SequenceStatus.FINISHED
            }


def _one(sequence: Sequence, drafts: list[int]) -> Piece:
    position = len(sequence.token_ids) + len(drafts) - 1
    return Piece(drafts[-1:], position, sequence.block_table, Rows.LAST)

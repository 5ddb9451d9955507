"""Proposes drafts on the device: the draft model, and the interface that other drafters share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...engine.kv.kv_cache_groups import NO_BLOCK
from ...engine.plan import BlockCopy, Span
from ...engine.sequence import Sequence, SequenceStatus
from ..forward.batch import Rows, SequenceChunk, pack
from ..forward.decode_batch import DecodeBatch
from ..kv.kv_pool import KVPool
from ..sampling.sampler import Sampler, SamplingBatch, takes_largest
from .acceptance import DRAFT_STREAM
from .draft_masks import DraftMasks
from .draft_rows import DraftRows, SampledRow

if TYPE_CHECKING:
    from ..loading.loader import LoadedModel

__all__ = ["DraftModel", "Drafter", "Proposal"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one sequence.

    Attributes:
        token_ids: k of them.
        probabilities: float64 ``[k, V]``, from which each was drawn; None if it was certain.
    """

    token_ids: tuple[int, ...]
    probabilities: Tensor | None = None


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

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        """Drafts for spans whose last token is the sequence's last.

        Args:
            spans: each asks for ``num_drafts``, and its sequence's blocks have room for them.

        Returns:
            For each span ``num_drafts`` tokens, or none.

        Raises:
            Exception: anything. The step goes on without drafts, and the next call from where this
                one began.
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

    Its KV lies in tensors of its own, in the same blocks at the same offsets as the target's. So
    sharing, copying or giving away a block covers both. KV it has not read, or that is another's,
    would cost acceptance and nothing else.

    It draws proposals with the target's own random numbers for the same places (common random
    numbers), after the same options. Where the two distributions are alike, so are the two tokens.

    One forward of at most ``max_read`` tokens reads what it lacks of all sequences, those first
    that are nearest to their last token. So the target's largest step has at most one as large of a
    smaller model beside it, however many sequences that must catch up with. Until it has caught up,
    a sequence has no drafts.

    Args:
        loaded: the model.
        pool: of its geometry, with as many blocks as the target's.
        sampler: picks the proposals; None makes one that computes as the model does.
        target: whose tokens are to be guessed; of the same tokenizer.
        max_read: most tokens that it reads in a step before it proposes, at least 1.
        independent: draw with random numbers of its own, and tell the probabilities, as rejection
            sampling needs it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        sampler: Sampler | None,
        target: LoadedModel,
        *,
        max_read: int,
        independent: bool = False,
    ) -> None:
        self.loaded = loaded
        self.pool = pool
        # Only the model's own operations know the largest of logits that were not computed.
        self._may_screen = sampler is None
        self._sampler = Sampler(loaded.row_operations) if sampler is None else sampler
        self._eos_token_ids = target.eos_token_ids
        self._vocab_size = target.vocab_size
        self._max_read = max_read
        self._independent = independent
        self._has_same_tokens = loaded.vocab_size == target.vocab_size
        self._decodes = DecodeBatch(pool)
        self._known: dict[Sequence, _Known] = {}
        self._rows = DraftRows()
        self._batches: dict[int, SamplingBatch] = {}

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """See :class:`Drafter`; its own KV has the block numbers of the first KV cache group."""
        try:
            self.pool.copy_blocks([copy for copy in copies if copy.group == 0])
        except BaseException:
            self._known.clear()  # blocks may hold anything now
            raise

    @torch.inference_mode()
    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        """See :class:`Drafter`. A sequence that must be caught up with first has no drafts yet.

        It writes behind what it has read, and takes note of that after each forward that reads, and
        of drafts at the end. So if it raises, what it knows is right, and only the rest is read
        again.
        """
        try:
            return self._propose(spans)
        except BaseException:
            self._batches.clear()  # half set up for these rows, perhaps
            self._rows = DraftRows()
            raise

    def _propose(self, spans: Seq[Span]) -> list[Proposal]:
        chunks, active = self._allot(spans)
        if not chunks:
            return [Proposal(())] * len(spans)
        greedy = self._are_greedy(active)
        largest_only = greedy and self._may_screen
        logits = self._read(list(chunks.values()), largest_only=largest_only)
        for sequence, chunk in chunks.items():
            stop = chunk.start + len(chunk.token_ids)
            self._known[sequence] = _Known(stop, (), sequence.num_preemptions)
        drafts: dict[Sequence, list[int]] = {span.sequence: [] for span in active}
        if greedy:
            self._chain(logits, active, drafts)
            self._remember(spans, drafts)
            return [_proposal(drafts.get(span.sequence, []), ()) for span in spans]
        likely: dict[Sequence, list[Tensor]] = {span.sequence: [] for span in active}
        draft_masks = DraftMasks([span.sequence for span in active])
        offset = 0
        while active:
            masks = draft_masks.masks([span.sequence for span in active], drafts)
            tokens, probabilities = self._draw(logits, active, drafts, offset, masks)
            for span, row in zip(active, probabilities, strict=False):
                likely[span.sequence].append(row)
            for span, token in zip(active, tokens, strict=True):
                drafts[span.sequence].append(token)
            offset += 1
            active = _unfinished(active, drafts, offset)
            if active:
                logits = self._read([_one(span.sequence, drafts[span.sequence]) for span in active])
        self._remember(spans, drafts)
        return [
            _proposal(drafts.get(span.sequence, []), likely.get(span.sequence, []))
            for span in spans
        ]

    def _are_greedy(self, spans: Seq[Span]) -> bool:
        """Whether the most likely tokens are all that is asked for, and have the target's ids."""
        return (
            self._has_same_tokens
            and not self._independent
            and all(takes_largest(s.sequence) and not s.sequence.constraint for s in spans)
        )

    def _chain(self, logits: Tensor, active: list[Span], drafts: dict[Sequence, list[int]]) -> None:
        """Draft the most likely tokens one after the other, without the sampler's batches.

        Args:
            logits: of the first of them.
            active: spans of greedy sequences, a row each.
            drafts: of each of their sequences; gets the tokens.
        """
        offset = 0
        while active:
            for span, token in zip(active, self._sampler.most_likely(logits), strict=True):
                drafts[span.sequence].append(token)
            offset += 1
            active = _unfinished(active, drafts, offset)
            if not active:
                return
            step = self._decodes.pack(
                [drafts[span.sequence][-1] for span in active],
                [len(span.sequence.token_ids) + offset - 1 for span in active],
                [span.sequence.block_tables[:1] for span in active],
                largest_only=self._may_screen,
            )
            logits = self.loaded.forward(step, self.pool)

    def _allot(self, spans: Seq[Span]) -> tuple[dict[Sequence, SequenceChunk], list[Span]]:
        """What is read in this step, and the spans that are proposed for then, in the same order.

        The last row of each of these is wanted; a sequence of which less is read comes behind them.
        """
        behind = []
        for span in spans:
            sequence = span.sequence
            start, stop = self._num_read(sequence), len(sequence.token_ids)
            if stop + span.num_drafts > self.loaded.max_model_len:
                continue
            if sequence.block_tables[0][0] == NO_BLOCK and start == 0:
                continue  # what it would have to read has left the window
            behind.append((stop - start, start, span))
        behind.sort(key=lambda each: each[0])
        chunks: dict[Sequence, SequenceChunk] = {}
        active: list[Span] = []
        left = self._max_read
        for missing, start, span in behind:
            if not left:
                break
            sequence, count = span.sequence, min(missing, left)
            ids, tables = sequence.token_ids[start : start + count], sequence.block_tables[:1]
            rows = Rows.LAST if count == missing else Rows.NONE
            chunks[sequence] = SequenceChunk(ids, start, tables, rows)
            if count == missing:
                active.append(span)
            left -= count
        return chunks, active

    def _draw(
        self,
        logits: Tensor,
        spans: Seq[Span],
        drafts: dict[Sequence, list[int]],
        offset: int,
        masks: Seq[Tensor],
    ) -> tuple[list[int], Seq[Tensor]]:
        rows: list[SampledRow] = [
            self._rows.of(span.sequence, drafts[span.sequence])[offset] for span in spans
        ]
        batch = self._batches[offset] = SamplingBatch.from_sequences(
            rows,
            self.loaded.device,
            self._batches.get(offset),
            eos_token_ids=self._eos_token_ids,
            stream=DRAFT_STREAM if self._independent else 0,
        )
        logits = self._fit(logits)
        tokens: list[int] = self._sampler.sample(logits, batch, masks).tolist()
        return tokens, tuple(
            self._sampler.probabilities(logits, batch, masks)
        ) if self._independent else ()

    def _read(self, chunks: list[SequenceChunk], *, largest_only: bool = False) -> Tensor:
        step = pack(chunks, self.pool, largest_only=largest_only)
        return self.loaded.forward(step, self.pool)

    def _fit(self, logits: Tensor) -> Tensor:
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


def _proposal(drafts: Seq[int], likely: Seq[Tensor]) -> Proposal:
    count = len(drafts) - any(token_id < 0 for token_id in drafts[-1:])  # no distribution: no draft
    return Proposal(
        tuple(drafts[:count]), torch.stack(tuple(likely[:count])) if likely[:count] else None
    )


def _unfinished(spans: Seq[Span], drafts: dict[Sequence, list[int]], offset: int) -> list[Span]:
    """Those of which more than ``offset`` drafts are wanted, and whose last one is a token."""
    return [span for span in spans if span.num_drafts > offset and drafts[span.sequence][-1] >= 0]


def _one(sequence: Sequence, drafts: list[int]) -> SequenceChunk:
    position = len(sequence.token_ids) + len(drafts) - 1
    return SequenceChunk(drafts[-1:], position, sequence.block_tables[:1], Rows.LAST)

"""Runs the engine's plans on the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.states import Reason

from ..engine.output.step_output import StepOutput, StepTiming
from ..engine.plan import Plan, Span
from ..engine.requests.engine_request import Finish
from ..engine.sequence import Sequence
from .drafting.draft_fallback import DraftFallback
from .drafting.draft_rows import DraftRows, SampledRow
from .drafting.drafters import Drafter, Proposal
from .drafting.span_results import candidates_of_sequences, reports_of_spans, tokens_of_spans
from .drafting.verifier import Verifier
from .forward.batch import Rows, SequenceChunk, decode_chunks, pack
from .forward.step_packer import StepPacker, chunk_of
from .kv.kv_pool import KVPool
from .kv.memory_budget import release_unused
from .kv.swap_pool import SwapPool
from .sampling.logits_processors import nothing_left
from .sampling.prompt_logprobs import PromptRows
from .sampling.sampler import INVALID_TOKEN, NO_TOKEN_LEFT, Sampler, SamplingBatch
from .structured.mask_maker import Asked, MaskMaker, Masks

if TYPE_CHECKING:
    from .loading.loader import LoadedModel

__all__ = ["ModelRunner"]

log = logging.getLogger(__name__)

_NO_DISTRIBUTION = Finish(
    Reason.ENGINE_ERROR, "the model's logits for the next token are no numbers (NaN or infinite)"
)


class ModelRunner:
    """Computes steps: every scheduled token of every sequence in one forward, without padding.

    Args:
        loaded: the model.
        pool: where its KV goes; made for the geometry of ``loaded``.
        sampler: picks the next tokens; None makes one.
        swap_pool: keeps blocks of ``pool`` that plans swap out; None if none do.
        masks: makes the masks of constrained outputs; None makes one.
        drafter: proposes drafts where a plan asks for some; None proposes none.
        rejection: verify drafts by rejection sampling, see :mod:`.drafting.verifier`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        sampler: Sampler | None = None,
        swap_pool: SwapPool | None = None,
        masks: MaskMaker | None = None,
        drafter: Drafter | None = None,
        *,
        rejection: bool = False,
    ) -> None:
        self.loaded = loaded
        self.pool = pool
        self.swap_pool = swap_pool
        self._drafter = None if drafter is None else DraftFallback(drafter)
        self._draft_rows = DraftRows()
        self._sampler = Sampler(loaded.row_operations) if sampler is None else sampler
        self._verifier = Verifier(self._sampler, loaded.eos_token_ids, rejection=rejection)
        self._masks = MaskMaker() if masks is None else masks
        self._packer = StepPacker(pool)
        # Only torch's forward records gradients, and entering the mode takes time in every step.
        self._no_gradients = torch.inference_mode if loaded.native is None else nullcontext
        self._batch: SamplingBatch | None = None

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        """Copy the plan's blocks, compute its spans and sample where they end a sequence.

        Args:
            plan: what to compute.
            meanwhile: called once while the device computes, or at least before tokens are sampled;
                not if what comes before fails.

        If this raises, all copies have been made: only the forward and what follows may raise.

        Returns:
            The sampled tokens of each span. A span that does not sample, or is deferred (see
            :mod:`.structured.mask_maker`), has none; so has one without a token to choose, which
            fails alone. With drafts, the accepted ones and the token sampled after them. If the
            copies could not be made, all spans fail.
        """
        with self._no_gradients():
            return self._run(plan, meanwhile)

    def _run(self, plan: Plan, meanwhile: Callable[[], None] | None) -> StepOutput:
        began = time.perf_counter()
        prepared = self._packer.take(plan)
        if prepared is not None:  # so there is nothing to copy, and no draft, mask or prompt
            logits = prepared.forward(meanwhile)
            return self._sample(
                plan, logits, prepared.sequences, (), {}, (began, 0.0),
                largest_only=prepared.step.largest_only,
            )  # fmt: skip
        try:
            self._move(plan)
        except Exception as error:  # whatever the reason, the blocks hold wrong contents
            return _unmoved(plan, error)
        sampling = [span.sequence for span in plan.spans if span.samples]
        proposals, draft_seconds = self._propose(plan)
        drafts = {sequence: of.token_ids for sequence, of in proposals.items()}
        asked = self._masks.begin(
            sampling, [drafts.get(s, ()) for s in sampling] if drafts else None
        )
        prompts = PromptRows.of(plan.spans, drafts, self.loaded.device)
        largest_only = prompts is None and self._packer.are_greedy(sampling)
        step = self._packer.pack(plan, drafts, largest_only=largest_only)
        logits = self.loaded.forward(step, self.pool, meanwhile)
        times = began, draft_seconds
        if prompts is None:
            return self._sample(
                plan, logits, sampling, asked, proposals, times, largest_only=largest_only
            )
        figures = prompts.compute(logits, self.loaded.row_operations)
        logits = logits[prompts.sampled]
        output = self._sample(plan, logits, sampling, asked, proposals, times)
        return replace(output, prompt_logprobs=prompts.by_sequence(figures))

    def prepare(self, plan: Plan) -> None:
        """Pack a plan whose ``token_ids`` are missing, while another one runs; see :meth:`run`.

        Args:
            plan: of a step planned ahead. It may never be run; :meth:`run` knows it by its spans.

        Raises:
            ValueError: a block table does not reach its sequence's position.
        """
        self._packer.prepare(plan, self.loaded.prepare)

    def recover(self) -> None:
        """Make ready for another step after a failed one whose tensors are no longer held.

        Raises:
            RuntimeError: the device is lost.
        """
        release_unused(self.loaded.device)

    def _sample(
        self,
        plan: Plan,
        logits: Tensor,
        sampling: list[Sequence],
        asked: Seq[Asked],
        proposals: Mapping[Sequence, Proposal],
        times: tuple[float, float],
        *,
        largest_only: bool = False,
    ) -> StepOutput:
        """What a step gives whose forward is queued.

        Args:
            plan: the step's.
            logits: a row for each token that is sampled.
            sampling: the sequences of these rows; one with drafts has a row more for each.
            asked: the masks that are being made.
            proposals: the drafts of the sequences that have some.
            times: when the step began, and the seconds its draft model took.
            largest_only: whether all sequences :func:`.sampling.sampler.takes_largest`.
        """
        began, draft_seconds = times
        drafts = {sequence: of.token_ids for sequence, of in proposals.items()}
        if largest_only and sampling and not asked:
            return self._take_largest(plan, logits, drafts, times)
        if not sampling:  # nothing to wait for: a device may still be at it
            return StepOutput(
                tuple(() for _ in plan.spans),
                swap_s=self._swap_seconds(),
                timing=StepTiming(time.perf_counter() - began, draft_seconds),
            )
        rows: list[SampledRow] = list(sampling)
        if drafts:
            rows = [r for s in sampling for r in self._draft_rows.of(s, drafts.get(s, ()))]
            self._draft_rows.keep(sampling)
        self._batch = SamplingBatch.from_sequences(
            rows, self.loaded.device, self._batch, eos_token_ids=self.loaded.eos_token_ids
        )
        masks = self._masks.join(asked, others=len(asked) < len(plan.spans))
        chosen = self._sampler.sample(logits, self._batch, masks.tensors)
        if drafts:
            chosen = self._verifier.choose(logits, chosen, rows, proposals, masks.tensors)
        report = self._sampler.report(logits, self._batch, chosen)
        candidates = self._sampler.candidates(logits, self._batch)
        # The step's one wait for the device: everything before only queues work on it.
        sampled = chosen.tolist()
        token_ids = tokens_of_spans(plan, sampled, drafts)
        output = StepOutput(
            token_ids,
            {},
            {} if report is None else reports_of_spans(plan, report.by_row(), drafts, token_ids),
            {} if candidates is None else candidates_of_sequences(rows, candidates.by_row()),
            swap_s=self._swap_seconds(),
            draft_failed=self._drafter is not None and self._drafter.take_failed(),
            drafted=_num_drafted(plan, drafts),
            timing=StepTiming(time.perf_counter() - began, draft_seconds),
        )
        if min(sampled) >= 0 and not masks.deferred and not masks.failures:
            return output
        return _set_apart(plan, output, masks)

    def _take_largest(
        self,
        plan: Plan,
        logits: Tensor,
        drafts: Mapping[Sequence, tuple[int, ...]],
        times: tuple[float, float],
    ) -> StepOutput:
        """:meth:`_sample` without all that greedy sequences do not ask for.

        Their drafts are right where they are the most likely tokens.
        """
        self._batch = None  # what others have asked for is not kept for them
        sampled = self._sampler.most_likely(logits)
        output = StepOutput(
            tokens_of_spans(plan, sampled, drafts),
            swap_s=self._swap_seconds(),
            draft_failed=self._drafter is not None and self._drafter.take_failed(),
            drafted=_num_drafted(plan, drafts),
            timing=StepTiming(time.perf_counter() - times[0], times[1]),
        )
        return output if min(sampled) >= 0 else _set_apart(plan, output, Masks())

    def _propose(self, plan: Plan) -> tuple[dict[Sequence, Proposal], float]:
        """The drafts of each sequence that has some, and the seconds the draft model took."""
        wanting = [span for span in plan.spans if span.num_drafts and _may_draft(span.sequence)]
        drafts = {span.sequence: Proposal(span.drafts) for span in wanting if span.drafts}
        asking = [span for span in wanting if not span.drafts]
        if not asking or self._drafter is None:
            return drafts, 0.0
        began = time.perf_counter()
        for span, proposal in zip(asking, self._drafter.propose(asking), strict=True):
            allowed = _cut(span.sequence, proposal)
            if allowed.token_ids:
                drafts[span.sequence] = allowed
        return drafts, time.perf_counter() - began

    def _move(self, plan: Plan) -> None:
        """Out, in, from block to block: see ``HostPool`` for why in this order."""
        if plan.swaps_out or plan.swaps_in:
            if self.swap_pool is None:
                raise IntegrityError("a plan swaps, and there is no memory to swap to")
            self.swap_pool.swap(plan.swaps_out, plan.swaps_in)
        self.pool.copy_blocks(plan.copies)
        if self._drafter is not None:
            self._drafter.copy_blocks(plan.copies)

    def _swap_seconds(self) -> float | None:
        return None if self.swap_pool is None else self.swap_pool.take_seconds()

    @torch.inference_mode()
    def logits(self, spans: Seq[Span], *, last_only: bool = False) -> Tensor:
        """Compute ``spans`` without sampling.

        Args:
            spans: as in a plan; their KV is stored in the pool.
            last_only: one row for each span, of its last token, instead of all its tokens' rows.

        Returns:
            float32 ``[rows, vocab]``, span after span.
        """
        rows = Rows.LAST if last_only else Rows.ALL
        chunks = [replace(chunk_of(span, ()), rows=rows) for span in spans]
        return self._forward(chunks).float()

    @torch.inference_mode()
    def warm_up(self, *, max_batch_tokens: int, max_sequences: int) -> float:
        """Run the largest prefill and the largest decode step once, so that no request pays for it.

        The device finds or refuses the memory of such a step now, and whatever a first call sets up
        is set up. It writes to the pool: call it before that holds anything.

        Returns:
            Seconds it took.
        """
        begin = time.perf_counter()
        size, num_groups = self.pool.block_size, len(self.pool.groups)
        blocks = range(min(group.num_blocks for group in self.pool.groups))
        longest = min(max_batch_tokens, self.loaded.max_model_len, size * len(blocks))
        table = blocks[: -(-longest // size)]
        prefill = SequenceChunk([0] * longest, 0, [table] * num_groups, Rows.LAST)
        decode = self._decode_chunks(min(max_sequences, max_batch_tokens))
        for chunks in ([prefill], decode, decode[:1]):
            self._forward(chunks)
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.device)
        seconds = time.perf_counter() - begin
        log.info("warm-up took %.2f s", seconds)
        return seconds

    @torch.inference_mode()
    def time_decode(self, num_sequences: int, *, repeats: int = 5) -> float:
        """Seconds of a decode step of ``num_sequences`` short sequences: the least of some tries.

        Other load on the machine can only make a try longer. It writes to the pool, like
        :meth:`warm_up`.
        """
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            logits = self._forward(self._decode_chunks(num_sequences), largest_only=True)
            self.loaded.row_operations.largest(logits)[1].cpu()  # waits for it
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def _decode_chunks(self, num_sequences: int) -> list[SequenceChunk]:
        return decode_chunks(self.pool, num_sequences, longest=self.loaded.max_model_len)

    def _forward(self, chunks: Seq[SequenceChunk], *, largest_only: bool = False) -> Tensor:
        step = pack(chunks, self.pool, largest_only=largest_only)
        return self.loaded.forward(step, self.pool)


def _num_drafted(plan: Plan, drafts: Mapping[Sequence, tuple[int, ...]]) -> dict[Sequence, int]:
    """Of each span that was to have drafts, the number of those that were verified."""
    return {s.sequence: len(drafts.get(s.sequence, ())) for s in plan.spans if s.num_drafts}


def _may_draft(sequence: Sequence) -> bool:
    """Whether masks can be made for drafts, also in a step that is run again since it raised."""
    return sequence.constraint is None or sequence.constraint.may_draft


def _cut(sequence: Sequence, proposal: Proposal) -> Proposal:
    """The proposal up to the first draft that the output's constraint forbids.

    Rejection sampling must see forbidden drafts, too: it replaces them by tokens of the target's
    remaining distribution.
    """
    constraint = sequence.constraint
    if constraint is None or proposal.probabilities is not None:
        return proposal
    drafts = proposal.token_ids
    return Proposal(
        drafts[: constraint.num_allowed(sequence.token_ids, sequence.num_prompt_tokens, drafts)]
    )


def _unmoved(plan: Plan, error: Exception) -> StepOutput:
    log.error("copying KV blocks failed: %s", error, exc_info=error)
    reason = (
        Reason.OUT_OF_MEMORY
        if isinstance(error, MemoryError | torch.OutOfMemoryError)
        else Reason.ENGINE_ERROR
    )
    first_line = (str(error).splitlines() or [""])[0]
    finish = Finish(reason, f"KV blocks could not be copied: {type(error).__name__}: {first_line}")
    return StepOutput(
        tuple(() for _ in plan.spans), dict.fromkeys(range(len(plan.spans)), finish), moved=False
    )


def _set_apart(plan: Plan, output: StepOutput, masks: Masks) -> StepOutput:
    """The output without the tokens of those that got none, and with what becomes of them."""
    token_ids, failures, deferred = list(output.token_ids), {}, set()
    indexes = [index for index, span in enumerate(plan.spans) if span.samples]
    for row, index in enumerate(indexes):
        token_id = token_ids[index][0]
        if row in masks.failures:
            failures[index] = masks.failures[row]
        elif row in masks.deferred:
            deferred.add(index)
        elif token_id == INVALID_TOKEN:
            failures[index] = _NO_DISTRIBUTION
        elif token_id == NO_TOKEN_LEFT:
            failures[index] = nothing_left(plan.spans[index].sequence.options)
        else:
            continue
        token_ids[index] = ()
    return replace(
        output, token_ids=tuple(token_ids), failures=failures, deferred=frozenset(deferred)
    )

"""Packs plans, and the step after the present one before its tokens are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import is_

from ...engine.plan import Plan, Span
from ...engine.sequence import Sequence
from ..kv.kv_pool import KVPool
from ..sampling.sampler import takes_largest
from .batch import Forward, PackedStep, Rows, SequenceChunk, pack
from .decode_batch import DecodeBatch
from .step_buffers import Numbers

__all__ = ["PreparedPlan", "StepPacker", "chunk_of"]


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan whose tokens alone are missing.

    Attributes:
        plan: the plan, without ``token_ids``.
        step: the packed step.
        tokens: of the step, one of each sequence, on the host; not known yet.
        sequences: of the plan; all of them sample.
        forward: computes the step with the tokens that it has then.
    """

    plan: Plan
    step: PackedStep
    tokens: Numbers
    sequences: list[Sequence]
    forward: Forward

    def fill(self, token_ids: tuple[int, ...]) -> None:
        """Give the step its tokens, one of each sequence.

        Raises:
            ValueError: there are more or fewer.
        """
        self.tokens.write(token_ids)
        if self.step.input_ids.device.type != "cpu":  # else they are the same memory
            self.step.input_ids.copy_(self.tokens.tensor)


class StepPacker:
    """Packs the steps of one runner.

    Args:
        pool: where the sequences' KV lies.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._decodes = DecodeBatch(pool)
        self._sequences: list[Sequence] = []
        self._are_all_greedy = True
        self._prepared: PreparedPlan | None = None

    def are_greedy(self, sequences: list[Sequence]) -> bool:
        """Whether all of them :func:`.sampling.sampler.takes_largest`.

        Their options are looked at once, as long as steps have the same sequences.
        """
        known = self._sequences
        if len(known) != len(sequences) or not all(map(is_, known, sequences)):
            self._sequences = sequences
            self._are_all_greedy = all(map(takes_largest, sequences))
        return self._are_all_greedy

    def pack(
        self, plan: Plan, drafts: Mapping[Sequence, tuple[int, ...]], *, largest_only: bool
    ) -> PackedStep:
        """Pack a plan.

        Args:
            plan: what to compute.
            drafts: of the sequences that have some.
            largest_only: as in :class:`.batch.PackedStep`.
        """
        spans = plan.spans
        if not all(map(_is_decode, spans)):
            chunks = [chunk_of(span, drafts.get(span.sequence, ())) for span in spans]
            return pack(chunks, self._pool, largest_only=largest_only)
        tokens = plan.token_ids or [span.sequence.token_ids[span.start] for span in spans]
        if not drafts:
            return self._pack_decodes(spans, tokens, largest_only=largest_only)
        behind = [drafts.get(span.sequence, ()) for span in spans]
        tokens = [id for token, more in zip(tokens, behind, strict=True) for id in (token, *more)]
        query_lens = tuple([1 + len(more) for more in behind])
        return self._pack_decodes(spans, tokens, query_lens, largest_only=largest_only)

    def prepare(self, plan: Plan, begin: Callable[[PackedStep, KVPool], Forward]) -> None:
        """Pack a plan whose tokens are not known, for :meth:`take`.

        Args:
            plan: each of its spans decodes one token.
            begin: makes ready what computes a step; its tokens may change until it runs.
        """
        self._prepared = None
        sequences = [span.sequence for span in plan.spans]
        unknown = [0] * len(sequences)
        step = self._pack_decodes(
            plan.spans, unknown, ahead=True, largest_only=self.are_greedy(sequences)
        )
        assert step.buffers is not None
        forward = begin(step, self._pool)
        self._prepared = PreparedPlan(plan, step, step.buffers.tokens, sequences, forward)

    def take(self, plan: Plan) -> PreparedPlan | None:
        """What was prepared for this plan, with its tokens; only once. None: nothing was."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.plan.spans is not plan.spans:
            return None
        prepared.fill(plan.token_ids)
        self._decodes.take_ahead()
        return prepared

    def _pack_decodes(
        self,
        spans: tuple[Span, ...],
        tokens: Seq[int],
        query_lens: tuple[int, ...] | None = None,
        *,
        ahead: bool = False,
        largest_only: bool,
    ) -> PackedStep:
        return self._decodes.pack(
            tokens,
            [span.start for span in spans],
            [span.sequence.block_tables for span in spans],
            query_lens,
            ahead=ahead,
            largest_only=largest_only,
        )


def _is_decode(span: Span) -> bool:
    """Whether it computes one token, whose logits alone are wanted."""
    return span.num_tokens == 1 and span.samples and span.sequence.num_prompt_logprobs is None


def chunk_of(span: Span, drafts: tuple[int, ...]) -> SequenceChunk:
    """The tokens of a span, with those drafted behind it."""
    sequence, start = span.sequence, span.start
    token_ids = sequence.token_ids[start : start + span.num_tokens]
    if drafts:  # behind the one token that is not computed yet; every row is wanted
        return SequenceChunk([*token_ids, *drafts], start, sequence.block_tables, Rows.ALL)
    if sequence.num_prompt_logprobs is not None and span.prompt_rows:
        rows = Rows.ALL
    else:
        rows = Rows.LAST if span.samples else Rows.NONE
    return SequenceChunk(token_ids, start, sequence.block_tables, rows)

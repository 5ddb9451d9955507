"""Logits and perplexity along given tokens, by both paths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.sequence import Sequence as EngineSequence
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.shared.protocol.sampling_options import SamplingOptions

from .hf_reference import Reference

__all__ = ["Comparison", "Passage", "compare_logits"]

_BLOCK_SIZE = 8
_WIDTH = 3
"""Passages in flight: each holds the reference's logits of all its tokens."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that both paths are led along.

    Attributes:
        token_ids: within the model's context.
        score_from: position of the first token whose likelihood counts for the perplexity; None
            for none.
    """

    token_ids: tuple[int, ...]
    score_from: int | None = None


@dataclass(slots=True)
class Comparison:
    """What the two paths gave for the same tokens.

    Attributes:
        differences: of each token's logits: ``max|ours - theirs| / max|theirs|``.
        errors: of our logits against those of the same weights in float32, in the same measure.
        errors_reference: of transformers' logits. Both are empty without such an exact reference.
        scored: tokens whose likelihood was summed.
        nll: sum of their negative log-likelihoods by our path, in nats.
        nll_reference: the same by transformers.
        agreed: of the scored tokens, those before which both gave the same token the largest logit.
    """

    differences: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    errors_reference: list[float] = field(default_factory=list)
    scored: int = 0
    nll: float = 0.0
    nll_reference: float = 0.0
    agreed: int = 0

    def add(self, other: Comparison) -> None:
        """Count also what ``other`` has compared."""
        self.differences += other.differences
        self.errors += other.errors
        self.errors_reference += other.errors_reference
        self.scored += other.scored
        self.nll += other.nll
        self.nll_reference += other.nll_reference
        self.agreed += other.agreed


def compare_logits(
    loaded: LoadedModel,
    reference: Reference,
    exact: Reference | None,
    passages: Sequence[Passage],
    rng: random.Random,
    *,
    longest_chunk: int,
    progress: Callable[[int], None],
) -> Comparison:
    """Lead our path, in random chunks of random mixes, and transformers along ``passages``.

    Args:
        loaded: the model.
        reference: the same by transformers: one plain forward per passage.
        exact: the same in float32, where the model is in half precision.
        passages: the tokens.
        rng: draws chunks, mixes and blocks.
        longest_chunk: query tokens of one passage in one step, at most.
        progress: told the number of tokens after each step.
    """
    size = _BLOCK_SIZE
    per_passage = -(-max(len(passage.token_ids) for passage in passages) // size)
    pool = KVPool(loaded.geometry, _WIDTH * per_passage, size, loaded.device, loaded.dtype)
    runner = ModelRunner(loaded, pool)
    free = rng.sample(range(pool.num_blocks), pool.num_blocks)
    waiting = list(reversed(passages))
    running: list[_Running] = []
    result = Comparison()
    while waiting or running:
        while waiting and len(running) < _WIDTH:
            running.append(_Running.start(waiting.pop(), reference, exact, free))
        chosen = rng.sample(running, rng.randint(1, len(running)))
        spans = [one.next_span(rng.randint(1, longest_chunk)) for one in chosen]
        rows, first = runner.logits(spans), 0
        for one, span in zip(chosen, spans, strict=True):
            _compare(rows[first : first + span.num_tokens], one, result)
            first += span.num_tokens
            one.sequence.num_computed_tokens += span.num_tokens
            if one.sequence.num_computed_tokens == one.sequence.num_tokens:
                free += one.sequence.block_tables[0]
                running.remove(one)
        rng.shuffle(free)
        progress(sum(span.num_tokens for span in spans))
    return result


@dataclass(eq=False, slots=True)
class _Running:
    passage: Passage
    sequence: EngineSequence
    expected: Tensor
    exact: Tensor | None

    @classmethod
    def start(
        cls, passage: Passage, reference: Reference, exact: Reference | None, free: list[int]
    ) -> _Running:
        options = SamplingOptions(temperature=0.0)
        sequence = EngineSequence(id="passage", prompt_ids=passage.token_ids, options=options)
        num_blocks = -(-sequence.num_tokens // _BLOCK_SIZE)
        sequence.block_tables = ([free.pop() for _ in range(num_blocks)],)
        return cls(
            passage,
            sequence,
            reference.logits(passage.token_ids),
            None if exact is None else exact.logits(passage.token_ids),
        )

    def next_span(self, num_tokens: int) -> Span:
        start = self.sequence.num_computed_tokens
        num_tokens = min(num_tokens, self.sequence.num_tokens - start)
        return Span(self.sequence, start, num_tokens, samples=False)


def _compare(ours: Tensor, one: _Running, result: Comparison) -> None:
    start = one.sequence.num_computed_tokens
    theirs = one.expected[start : start + len(ours)]
    result.differences += _differences(ours, theirs)
    if one.exact is not None:
        exact = one.exact[start : start + len(ours)]
        result.errors += _differences(ours, exact)
        result.errors_reference += _differences(theirs, exact)
    if one.passage.score_from is None:
        return
    # The row of position p gives the likelihood of the token at p + 1.
    first = max(one.passage.score_from - 1, start)
    last = min(start + len(ours), len(one.passage.token_ids) - 1)
    if first >= last:
        return
    targets = torch.tensor(one.passage.token_ids[first + 1 : last + 1], device=ours.device)
    part = slice(first - start, last - start)
    result.scored += last - first
    result.nll += _nll(ours[part], targets)
    result.nll_reference += _nll(theirs[part], targets)
    result.agreed += int((ours[part].argmax(-1) == theirs[part].argmax(-1)).sum())


def _differences(found: Tensor, expected: Tensor) -> list[float]:
    """``max|found - expected| / max|expected|`` of each row; infinite where it is not a number."""
    difference = (found - expected).abs().amax(dim=-1)
    size = expected.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    ratios: list[float] = (difference / size).nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()
    return ratios


def _nll(logits: Tensor, targets: Tensor) -> float:
    """Sum over rows of the negative log-likelihood of ``targets``, in float64."""
    return float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))

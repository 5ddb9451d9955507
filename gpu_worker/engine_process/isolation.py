"""A step that raises fails the requests that cause it, and no others.

One poisoned request, or one too large for the memory that is left, must not take its batch with
it: the batch is run in halves until each culprit is alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from penstock.shared.protocol.states import Reason

from ..engine.output.step_output import StepOutput
from ..engine.plan import Plan, Span
from ..engine.requests.engine_request import Finish

__all__ = ["Runner", "run_isolated"]

_log = logging.getLogger("penstock.worker")

_SMALL_CHUNK = 16
"""Chunks of this size need hardly any memory of their own: to halve them again would not help."""


class Runner(Protocol):
    """The model side, as the worker's loop sees it."""

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        """Compute a plan.

        Args:
            plan: what to compute.
            meanwhile: called at most once, before the plan's tokens are sampled: best while the
                device computes. A plan that does not get so far may leave it out.

        May raise; then no span of it counts as computed, but its copies and swaps are done. If
        these fail, it says so in its output (``moved``) and does not raise.
        """

    def prepare(self, plan: Plan) -> None:
        """Do now what running a plan takes beside its tokens; called while another one runs.

        Args:
            plan: a step planned ahead, without its ``token_ids``. If it is run, its ``spans`` are
                these. It may never be.

        May raise; then the plan is run all the same, and raises again where it cannot be.
        """

    def recover(self) -> None:
        """Prepare for another run after one that failed, once nothing holds its tensors.

        Raises if the device no longer computes; then this process is of no use.
        """


def run_isolated(runner: Runner, plan: Plan) -> StepOutput:
    """Run a plan; if it raises, run its halves, until only the culprits have failed.

    A sequence that gets no memory even alone is run in shorter chunks, one after the other.

    Computing a span again is harmless: the same keys and values go to the same slots, and random
    numbers are keyed by request and index. Block copies and swaps are not repeated. They were done
    before the forward pass that failed (a runner whose copies fail does not raise), and their
    sources may have changed since.

    Returns:
        Tokens of the spans that could be computed, and the failures of the others.

    Raises:
        Exception: the runner does not recover.
    """
    try:
        return runner.run(plan)
    except Exception as error:
        finish = Finish(_reason(error), _describe(error))
        divides = _divides(plan, finish.reason)
        if not divides:
            _log.error("a request fails in the model: %s", error, exc_info=error)
    # Only now that the exception is gone: its traceback held all tensors of the step that failed.
    runner.recover()
    if not divides:
        return StepOutput(((),), {0: finish})
    if len(plan.spans) > 1:
        return _run_halves(runner, plan.spans)
    return _run_shorter(runner, plan.spans[0])


def _divides(plan: Plan, reason: Reason) -> bool:
    """Whether there is something smaller to run."""
    if len(plan.spans) > 1:
        return True
    return reason is Reason.OUT_OF_MEMORY and plan.spans[0].num_tokens > _SMALL_CHUNK


def _run_halves(runner: Runner, spans: tuple[Span, ...]) -> StepOutput:
    """Of several spans some, then the others."""
    middle = len(spans) // 2
    first = run_isolated(runner, Plan(spans[:middle]))
    rest = run_isolated(runner, Plan(spans[middle:]))
    failures = {middle + index: finish for index, finish in rest.failures.items()}
    return StepOutput(
        first.token_ids + rest.token_ids,
        {**first.failures, **failures},
        {**first.logprobs, **rest.logprobs},
        {**first.candidates, **rest.candidates},
        prompt_logprobs={**first.prompt_logprobs, **rest.prompt_logprobs},
        deferred=first.deferred.union(middle + index for index in rest.deferred),
        drafted={**first.drafted, **rest.drafted},
        draft_failed=first.draft_failed or rest.draft_failed,
    )


def _run_shorter(runner: Runner, span: Span) -> StepOutput:
    """Of one span the first tokens, then the others, which read what those have written."""
    middle, sequence = span.num_tokens // 2, span.sequence
    first = run_isolated(runner, Plan((replace(span, num_tokens=middle, samples=False),)))
    if first.failures:
        return first
    behind = replace(span, start=span.start + middle, num_tokens=span.num_tokens - middle)
    rest = run_isolated(runner, Plan((behind,)))
    known = first.prompt_logprobs.get(sequence, ()) + rest.prompt_logprobs.get(sequence, ())
    return replace(rest, prompt_logprobs={sequence: known} if known else {})


def _reason(error: Exception) -> Reason:
    # torch.OutOfMemoryError on a GPU, MemoryError or "can't allocate memory" on a CPU, and what
    # cuBLAS says when there is none for itself. By name: this module must not import torch.
    text = f"{type(error).__name__} {error}".lower()
    signs = ("outofmemory", "out of memory", "allocate memory", "memoryerror", "_alloc_failed")
    return Reason.OUT_OF_MEMORY if any(sign in text for sign in signs) else Reason.ENGINE_ERROR


def _describe(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"

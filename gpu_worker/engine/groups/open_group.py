"""Which kind of group a request with several sequences needs, fresh or continued."""

from __future__ import annotations

from collections.abc import Callable

from penstock.shared.protocol import Reason

from ..output_state import Output
from ..request_validator import RequestValidator
from ..requests import EngineRequest, Finish
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from .beam_group import Beams
from .best_of import Candidates
from .group import Choices, Group, replay, summary

__all__ = ["open_group"]


def open_group(
    request: EngineRequest,
    first: Sequence,
    validator: RequestValidator,
    scheduler: Scheduler,
    output: Callable[[Sequence], Output],
) -> Group | Finish:
    """Begin a request that has several sequences.

    Args:
        request: of which other workers may have published a part.
        first: a sequence of the prompt alone, with choice 0.
        validator: refuses what can never fit.
        scheduler: gets the sequences.
        output: makes the output of a sequence that has none yet.

    Returns:
        Its group; or its end, if it cannot run or all was published but the end.
    """
    options = request.options
    finish = validator.too_large(first)
    if finish is not None:
        return finish
    published = request.choice_ids or ((request.output_ids,) if request.output_ids else ())
    sequences = [first, *(_twin(request, first, choice) for choice in range(1, options.n))]
    outputs = {sequence: output(sequence) for sequence in sequences}
    reasons: list[Reason] = []
    for sequence, token_ids in zip(sequences, published, strict=False):
        ended = replay(outputs[sequence], token_ids)
        if ended is not None:
            reasons.append(ended.reason)
            del outputs[sequence]
    if not outputs:
        return summary(reasons)
    if options.num_sequences == options.n and options.beam_width == 1:
        large = [f for sequence in outputs if (f := validator.too_large(sequence)) is not None]
        return large[0] if large else Choices(scheduler, validator, outputs, reasons)
    if any(published):
        return _whole(reasons, len(published))
    if options.beam_width > 1:
        return validator.search_too_large(first) or Beams(scheduler, validator, first, output)
    for choice in range(options.n, options.num_sequences):
        sequence = _twin(request, first, choice)
        outputs[sequence] = output(sequence)
    return Candidates(scheduler, validator, outputs)


def _twin(request: EngineRequest, first: Sequence, choice: int) -> Sequence:
    sequence = first.twin(choice, request.prompt_ids)
    if request.new_constraint is not None:
        sequence.constraint = request.new_constraint()  # each output has a state of its own
    return sequence


def _whole(reasons: list[Reason], num_published: int) -> Finish:
    """The end of a request whose choices are published all at once, of which some are."""
    if len(reasons) == num_published:  # a search may find fewer outputs than it was asked for
        return summary(reasons)
    message = "its token log in Redis holds a part of an output that is only published whole"
    return Finish(Reason.ENGINE_ERROR, message)

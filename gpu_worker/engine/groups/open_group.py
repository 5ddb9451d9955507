"""Which kind of group a request with several sequences needs, fresh or continued."""

from __future__ import annotations

from collections.abc import Callable

from penstock.shared.protocol.states import Reason

from ..output.output_state import OutputState
from ..requests.engine_request import EngineRequest, Finish
from ..requests.request_validator import RequestValidator
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from .beam_group import BeamGroup
from .best_of_group import BestOfGroup
from .choice_group import ChoiceGroup, summary
from .sequence_group import SequenceGroup, replay

__all__ = ["open_group"]


def open_group(
    request: EngineRequest,
    first: Sequence,
    validator: RequestValidator,
    scheduler: Scheduler,
    output: Callable[[Sequence], OutputState],
) -> SequenceGroup | Finish:
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
    sequences = [first, *(_clone(request, first, choice) for choice in range(1, options.n))]
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
        return large[0] if large else ChoiceGroup(scheduler, validator, outputs, reasons)
    if any(published):
        return _whole(reasons, len(published))
    if options.beam_width > 1:
        return validator.search_too_large(first) or BeamGroup(scheduler, validator, first, output)
    for choice in range(options.n, options.num_sequences):
        sequence = _clone(request, first, choice)
        outputs[sequence] = output(sequence)
    return BestOfGroup(scheduler, validator, outputs)


def _clone(request: EngineRequest, first: Sequence, choice: int) -> Sequence:
    sequence = first.clone(choice, request.prompt_ids)
    if request.new_constraint is not None:
        sequence.constraint = request.new_constraint()  # each output has a state of its own
    return sequence


def _whole(reasons: list[Reason], num_published: int) -> Finish:
    """The end of a request whose choices are published all at once, of which some are."""
    if len(reasons) == num_published:  # a search may find fewer outputs than it was asked for
        return summary(reasons)
    message = "its token log in Redis holds a part of an output that is only published whole"
    return Finish(Reason.ENGINE_ERROR, message)

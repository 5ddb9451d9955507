"""The requests in the engine: how each begins, what it publishes, how it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.events import TokenLogprobs

from ..config import EngineConfig
from ..groups.open_group import open_group
from ..groups.sequence_group import SequenceGroup, replay
from ..output.output_state import OutputState
from ..output.parsed_output import ParsedOutput
from ..output.step_output import StepOutput
from ..output.text_stream import TextStream
from ..plan import Span
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from .engine_request import EngineRequest, Finish, Update
from .request_validator import RequestValidator

__all__ = ["RequestManager"]


class RequestManager:
    """Every request that was taken and has not ended, by id.

    A request has an :class:`OutputState`, or a :class:`SequenceGroup` if it has several sequences.
    It is known here exactly as long as the scheduler knows a sequence of it.

    Args:
        config: sizes and budgets.
        validator: refuses what can never run.
        scheduler: gets the sequences.
        detokenizer: makes the incremental detokeniser of one output, given the prompt's ids.

    Attributes:
        outputs: output states of the requests with one sequence, by request id.
    """

    def __init__(
        self,
        config: EngineConfig,
        validator: RequestValidator,
        scheduler: Scheduler,
        detokenizer: Callable[[tuple[int, ...]], TextStream],
    ) -> None:
        self._config = config
        self._validator = validator
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self.outputs: dict[str, OutputState] = {}
        self._groups: dict[str, SequenceGroup] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}  # by request, until reported

    def __len__(self) -> int:
        return len(self.outputs) + len(self._groups)

    def sequences(self) -> set[Sequence]:
        """The sequences of all requests."""
        live = {output.sequence for output in self.outputs.values()}
        for group in self._groups.values():
            live.update(group.members)
        return live

    def add(self, request: EngineRequest) -> Update | None:
        """As :meth:`Engine.add`."""
        if request.id in self.outputs or request.id in self._groups:
            raise InvalidRequest("id", request.id, "an id that is not in the engine")
        if not request.prompt_ids:
            raise InvalidRequest("prompt_ids", request.prompt_ids, "at least one token")
        sequence = Sequence(
            id=request.id,
            prompt_ids=request.prompt_ids,
            options=request.options,
            lane=request.lane,
            tenant=request.tenant,
            seed=request.seed,
            arrival=request.arrival,
            deadline=request.deadline,
            cache_salt=request.tenant.encode() if self._config.salt_by_tenant else b"",
            constraint=None if request.new_constraint is None else request.new_constraint(),
        )
        finish = self._validator.refuse(sequence)
        if finish is None:
            finish = self._begin(request, sequence)
        if finish is not None:
            return _bare_end(sequence, len(request.output_ids), finish)
        return None

    def abort(self, request_id: str) -> bool:
        """As :meth:`Engine.abort`."""
        output = self.outputs.get(request_id)
        if output is not None:
            self._remove(output.sequence)
            return True
        group = self._pop_group(request_id)
        if group is None:
            return False
        group.remove()
        return True

    def may_go_on(self, spans: Iterable[Span]) -> list[OutputState] | None:
        """The outputs of all spans, if each may go on by the token that the step samples for it.

        None for requests with several sequences, with a constraint, or whose prompt's
        log-probabilities are due, and where an output will be as long as it may be. Whether a token
        ends one is not known yet.
        """
        outputs, most = self.outputs, self._validator.pool_tokens
        found: list[OutputState] = []
        for span in spans:
            sequence = span.sequence
            output = outputs.get(sequence.id)
            if (
                output is None
                or output.sequence is not sequence  # aborted, and here again
                or not span.samples
                or span.num_drafts
                or sequence.constraint is not None
                or sequence.num_prompt_logprobs is not None
                or not output.has_room(most)
            ):
                return None
            found.append(output)
        return found

    def collect(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """Append the tokens that a step gave a sequence.

        Args:
            sequence: of a live request.
            token_ids: at least one; those behind the output's end are dropped.
            output: the step's output, with log-probabilities and candidates.

        Returns:
            Updates to publish.
        """
        if sequence.siblings:
            return self._advance(sequence, token_ids, output)
        update = self.outputs[sequence.id].append_run(token_ids, self._validator.pool_tokens)
        update.logprobs = output.logprobs.get(sequence, ())[: len(update.token_ids)]
        self.complete_update(sequence, update)
        return [update]

    def complete_update(self, sequence: Sequence, update: Update) -> None:
        """Add the report of the prompt to an update, and end the request if it is over.

        The request has one sequence. It ends by its own rules, or because the pool is full.
        """
        if sequence.num_prompt_logprobs is not None:
            self._report_prompt(sequence, update)
        if update.finish is None and len(sequence.token_ids) > self._validator.pool_tokens:
            finish = self._validator.too_large(sequence)
            assert finish is not None
            self.outputs[sequence.id].close(update, finish)
        if update.finish is not None:
            self._remove(sequence)

    def end(self, sequence: Sequence, finish: Finish) -> Update:
        """End a request for another reason; its last update, without tokens."""
        group = self._pop_group(sequence.id)
        if group is not None:
            return group.end(finish)
        self._remove(sequence)
        return _bare_end(sequence, sequence.num_output_tokens, finish)

    def _begin(self, request: EngineRequest, sequence: Sequence) -> Finish | None:
        """Take the request, or return its end if it cannot run or is complete."""
        if request.options.prompt_logprobs is not None and not request.has_published:
            sequence.num_prompt_logprobs = 0
        if request.options.num_sequences == 1:
            output = self._output(request, sequence)
            finish = replay(output, request.output_ids) or self._validator.too_large(sequence)
            if finish is None:
                self.outputs[sequence.id] = output
                self._scheduler.add(sequence)
            return finish
        output_of = functools.partial(self._output, request)
        group = open_group(request, sequence, self._validator, self._scheduler, output_of)
        if isinstance(group, Finish):
            return group
        self._groups[request.id] = group
        return None

    def _output(self, request: EngineRequest, sequence: Sequence) -> OutputState:
        stream = self._detokenizer(tuple(sequence.token_ids))
        if request.new_parser is not None:
            return ParsedOutput(sequence, stream, self._config, request.new_parser())
        return OutputState(sequence, stream, self._config)

    def _advance(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """Append the tokens that a step gave one of several sequences of a request."""
        group = self._groups[sequence.id]
        updates = group.collect(sequence, token_ids, output)
        if sequence.num_prompt_logprobs is not None:
            self._report_prompt(sequence, updates[0])
        if group.is_over:
            self._pop_group(sequence.id)
        return updates

    def add_prompt_logprobs(self, sequence: Sequence, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Keep what a step computed of the prompt's log-probabilities until they are reported."""
        if sequence.num_prompt_logprobs is not None:
            sequence.num_prompt_logprobs += len(logprobs)
            self._prompt_logprobs.setdefault(sequence.id, []).extend(logprobs)

    def _report_prompt(self, sequence: Sequence, update: Update) -> None:
        """Report the prompt with the first token, and only once."""
        update.prompt_logprobs = (None, *self._prompt_logprobs.pop(sequence.id, ()))
        sequence.num_prompt_logprobs = None

    def _pop_group(self, request_id: str) -> SequenceGroup | None:
        self._prompt_logprobs.pop(request_id, None)
        return self._groups.pop(request_id, None)

    def _remove(self, sequence: Sequence) -> None:
        del self.outputs[sequence.id]
        self._prompt_logprobs.pop(sequence.id, None)
        self._scheduler.finish(sequence)


def _bare_end(sequence: Sequence, start: int, finish: Finish) -> Update:
    """The end of a sequence without further tokens."""
    num_cached = sequence.num_cached_tokens
    return Update(sequence.id, start, (), "", finish, sequence.num_prompt_tokens, num_cached)

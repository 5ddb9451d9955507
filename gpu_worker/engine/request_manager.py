"""The requests that are in the engine: how each begins, what its tokens give, how it ends."""

from __future__ import annotations

from collections.abc import Callable

from penstock.shared.errors import InvalidRequest

from .config import EngineConfig
from .groups.group import Group, replay
from .groups.open_group import open_group
from .output_state import Output
from .request_validator import RequestValidator
from .requests import EngineRequest, Finish, Update
from .scheduling.scheduler import Scheduler
from .sequence import Sequence
from .step_output import StepOutput
from .text_stream import TextStream

__all__ = ["LiveRequests"]


class LiveRequests:
    """Every request that was taken and has not ended, by id.

    Each has an output, or a group if it has several sequences, and is known here exactly as long as
    the scheduler knows a sequence of it.

    Args:
        config: sizes and budgets.
        validator: refuses what can never run.
        scheduler: gets the sequences.
        detokenizer: makes the incremental detokeniser of one output, given the prompt's ids.

    Attributes:
        outputs: of the requests with one sequence.
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
        self.outputs: dict[str, Output] = {}
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self.outputs) + len(self._groups)

    def sequences(self) -> set[Sequence]:
        """The sequences of all of them."""
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
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        group.remove()
        return True

    def collect(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """Give a sequence the tokens that a step gave it.

        Args:
            sequence: of a live request.
            token_ids: at least one; those behind the output's end are dropped.
            output: the step's, with what else was reported of them.

        Returns:
            What is to be published.
        """
        if sequence.siblings:
            return self._advance(sequence, token_ids, output)
        update = self.outputs[sequence.id].append_run(token_ids, self._validator.pool_tokens)
        update.logprobs = output.logprobs.get(sequence, ())[: len(update.token_ids)]
        self.settle(sequence, update)
        return [update]

    def settle(self, sequence: Sequence, update: Update) -> None:
        """The only sequence of a request has got ``update``: tell of its prompt, and see its end.

        It ends by its own rules, or because the pool is full.
        """
        if sequence.prompt_logprobs is not None:
            _report_prompt(sequence, update)
        if update.finish is None and len(sequence.token_ids) > self._validator.pool_tokens:
            update.finish = self._validator.too_large(sequence)
            update.text += self.outputs[sequence.id].flush()
        if update.finish is not None:
            self._remove(sequence)

    def end(self, sequence: Sequence, finish: Finish) -> Update:
        """End a request for another reason; its last update, without tokens."""
        group = self._groups.pop(sequence.id, None)
        if group is not None:
            return group.end(finish)
        self._remove(sequence)
        return _bare_end(sequence, sequence.num_output_tokens, finish)

    def _begin(self, request: EngineRequest, sequence: Sequence) -> Finish | None:
        """Take the request; its end, if it has one already."""
        if request.options.prompt_logprobs is not None and not request.has_published:
            sequence.prompt_logprobs = []
        if request.options.num_sequences == 1:
            output = self._output(sequence)
            finish = replay(output, request.output_ids) or self._validator.too_large(sequence)
            if finish is None:
                self.outputs[sequence.id] = output
                self._scheduler.add(sequence)
            return finish
        group = open_group(request, sequence, self._validator, self._scheduler, self._output)
        if isinstance(group, Finish):
            return group
        self._groups[request.id] = group
        return None

    def _output(self, sequence: Sequence) -> Output:
        prompt_ids = tuple(sequence.token_ids)
        return Output(sequence, self._detokenizer(prompt_ids), self._config)

    def _advance(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """What a step gave for one of several sequences of a request."""
        group = self._groups[sequence.id]
        updates = group.collect(sequence, token_ids, output)
        if sequence.prompt_logprobs is not None:
            _report_prompt(sequence, updates[0])
        if group.is_over:
            del self._groups[sequence.id]
        return updates

    def _remove(self, sequence: Sequence) -> None:
        del self.outputs[sequence.id]
        self._scheduler.finish(sequence)


def _report_prompt(sequence: Sequence, update: Update) -> None:
    """Tell of the prompt with the first token, so once: what is published is not asked for."""
    assert sequence.prompt_logprobs is not None
    update.prompt_logprobs = (None, *sequence.prompt_logprobs)
    sequence.prompt_logprobs = None


def _bare_end(sequence: Sequence, start: int, finish: Finish) -> Update:
    """The end of a sequence without further tokens."""
    num_cached = sequence.num_cached_tokens
    return Update(sequence.id, start, (), "", finish, sequence.num_prompt_tokens, num_cached)

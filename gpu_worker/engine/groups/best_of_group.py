"""``best_of``: more outputs than are asked for, of which the likeliest are given."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from penstock.shared.protocol.chat.deltas import Delta, moved_deltas
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.states import Reason

from ..output.output_state import OutputState
from ..output.step_output import StepOutput
from ..requests.engine_request import Update
from ..requests.request_validator import RequestValidator
from ..scheduling.scheduler import Scheduler
from ..sequence import Sequence
from .choice_group import ChoiceGroup, part_of, summary

__all__ = ["BestOfGroup", "Hypothesis", "answer"]


@dataclass(slots=True)
class Hypothesis:
    """A whole output that may become a choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    reason: Reason | None = None

    def add(self, update: Update) -> None:
        """What comes next."""
        self.deltas += moved_deltas(update.deltas, len(self.token_ids))
        self.token_ids += update.token_ids
        self.text += update.text
        self.logprobs += update.logprobs
        if update.finish is not None:
            self.reason = update.finish.reason

    @property
    def mean_logprob(self) -> float:
        """Over its tokens, of which it has at least one."""
        return sum(report.logprob for report in self.logprobs) / len(self.logprobs)


class BestOfGroup(ChoiceGroup):
    """Generates ``best_of`` outputs and publishes the ``n`` likeliest when all have ended.

    Until then nothing is published, so a worker that takes over begins anew. It draws the same
    tokens, since random numbers are keyed by candidate and index. Each candidate's tokens are
    reported with their log-probabilities, whether the request asks for them or not.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        validator: RequestValidator,
        outputs: dict[Sequence, OutputState],
    ) -> None:
        super().__init__(scheduler, validator, outputs)
        self._whole = {sequence: Hypothesis() for sequence in outputs}
        self._wants_logprobs = self.first.options.logprobs is not None
        options = replace(self.first.options, logprobs=self.first.options.logprobs or 0)
        for sequence in outputs:
            sequence.options = options

    @property
    def num_unpublished(self) -> int:
        """All that the candidates have, until the last has ended."""
        return sum(len(one.token_ids) for one in self._whole.values())

    def collect(
        self, sequence: Sequence, token_ids: tuple[int, ...], output: StepOutput
    ) -> list[Update]:
        """See :class:`SequenceGroup`: nothing, until the last candidate has ended."""
        (update,) = super().collect(sequence, token_ids, output)
        whole = self._whole[sequence]
        whole.add(update)
        whole.reason = update.parts[0].reason
        if not self.is_over:
            return []
        assert update.finish is not None
        if whole.reason is None:  # one does not fit into memory, and so the request has failed
            return [self.end(update.finish)]
        ranked = sorted(self._whole.values(), key=lambda one: -one.mean_logprob)
        return answer(self.first, ranked, with_logprobs=self._wants_logprobs)


def answer(
    first: Sequence, ranked: Seq[Hypothesis], *, with_logprobs: bool = False, generated: int = 0
) -> list[Update]:
    """The whole output of a request whose best hypotheses are its choices.

    Args:
        first: one of its sequences.
        ranked: the best first, at least as many as the request wants.
        with_logprobs: whether they are to be published.
        generated: tokens generated in all; 0: those of ``ranked``.
    """
    chosen = ranked[: first.options.n]
    generated = generated or sum(len(one.token_ids) for one in ranked)
    updates = [
        Update(
            first.id, 0, tuple(one.token_ids), one.text, None,
            first.num_prompt_tokens, first.num_cached_tokens,
            tuple(one.logprobs) if with_logprobs else (), rank,
        )
        for rank, one in enumerate(chosen)
    ]  # fmt: skip
    for update, one in zip(updates, chosen, strict=True):
        update.deltas = tuple(one.deltas)
    if first.options.n > 1:
        for update, one in zip(updates, chosen, strict=True):
            update.parts = (part_of(update, one.reason),)
    updates[-1].finish = replace(
        summary(one.reason for one in chosen),
        discarded_tokens=generated - sum(len(one.token_ids) for one in chosen),
    )
    return updates

"""Beam search: which continuations of which beams go on, and which outputs have ended.

Equals transformers' ``generate`` with ``num_beams`` step for step (``_beam_search`` of version 5),
for one prompt and without sampling. Knows token ids and log-probabilities, nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.shared.protocol.sampling_options import SamplingOptions

__all__ = ["BeamSearch", "Continuation", "Ended", "HasOutput"]


class HasOutput(Protocol):
    """A beam, as far as the search must know it."""

    @property
    def output_ids(self) -> list[int]:
        """Its tokens so far."""


class Continuation(NamedTuple):
    """A beam of the next step: which beam it continues, and with what."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An output that has ended, and its score: the sum of log-probabilities by its length."""

    score: float
    token_ids: tuple[int, ...]


class BeamSearch:
    """The state of one search.

    Each step every beam reports its most likely next tokens: enough that ``width`` go on even if
    all ending tokens are among them. A continuation that ends among the best ``width`` is kept if
    it beats an output kept before. The best ``width`` of the others are the next beams. No beam
    ever contributes more, so what it does not report cannot matter.

    Args:
        options: of the request.
        ending_ids: the tokens that end an output.
        max_tokens: tokens at which an output has its full length.

    Attributes:
        num_candidates: what each beam has to report.
        ended: the best outputs that have ended, the best first, at most ``width``.
    """

    def __init__(
        self, options: SamplingOptions, ending_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._width = options.beam_width
        self._penalty = options.length_penalty
        self._early = options.early_stopping
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._scores = [0.0]
        self._length = 0
        self.num_candidates = self._width + len(ending_ids)
        self.ended: list[Ended] = []

    def advance(
        self,
        beams: Sequence[HasOutput],
        candidates: Sequence[tuple[tuple[int, float], ...]],
    ) -> list[Continuation]:
        """Take a step.

        Args:
            beams: in the order of the last call's answer; at first the one that has no output.
            candidates: for each beam its ``num_candidates`` most likely tokens and the natural
                logarithms of their probabilities, the most likely first.

        Returns:
            The beams to go on with, the best first; none if the search is over.
        """
        self._length += 1
        at_full_length = self._length == self._max_tokens
        next_beams: list[Continuation] = []
        scores: list[float] = []
        news: list[Ended] = []
        for rank, (score, step) in enumerate(self._best_first(candidates)):
            if rank >= self._width and (at_full_length or len(next_beams) == self._width):
                break
            if at_full_length or step.token_id in self._ending_ids:
                if rank < self._width:
                    output = (*beams[step.parent].output_ids, step.token_id)
                    news.append(Ended(score / self._length**self._penalty, output))
            elif len(next_beams) < self._width:
                next_beams.append(step)
                scores.append(score)
        self.ended = sorted([*self.ended, *news], key=lambda one: -one.score)[: self._width]
        self._scores = scores
        return next_beams if self._goes_on() else []

    def _best_first(
        self, candidates: Sequence[tuple[tuple[int, float], ...]]
    ) -> Iterator[tuple[float, Continuation]]:
        """All continuations and their scores, put in order as far as they are asked for.

        Of equal scores that of the earlier beam comes first, then what it reported first.
        """

        def of_beam(beam: int) -> Iterator[tuple[float, Continuation]]:
            score = self._scores[beam]
            for token_id, logprob in candidates[beam]:
                yield score + logprob, Continuation(beam, token_id)

        return heapq.merge(*map(of_beam, range(len(candidates))), key=lambda pair: -pair[0])

    def _goes_on(self) -> bool:
        """Whether a beam may still give a better output than the worst that is kept."""
        if not self._scores or len(self.ended) < self._width:
            return bool(self._scores)
        if self._early is True:
            return False
        hopes_for_more = self._early == "never" and self._penalty > 0
        length = float(self._max_tokens if hopes_for_more else self._length)
        hope: float = self._scores[0] / length**self._penalty
        return hope > self.ended[-1].score

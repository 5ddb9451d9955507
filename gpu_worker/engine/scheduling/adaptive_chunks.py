"""How many prompt tokens a step may compute without delaying the sequences that decode."""

from __future__ import annotations

from ..plan import Plan
from .cost_fit import CostFit

__all__ = ["AdaptiveChunks"]

_DECODES_A_LESSON = 4
"""Of steps that only decode, the filter learns from one in so many. There are thousands in a row,
and it takes a twentieth of a small model's step."""


class AdaptiveChunks:
    """As many as let the step end in time: a model of its cost, fitted while it is used.

    The model: a step over ``n`` sequences, with ``p`` tokens beyond one of each and ``d`` drafts,
    costs ``a + b p + c n + e d`` seconds. Solved for the target, ``p`` is the chunk. The more
    sequences decode, the less is left for prompts; while none decodes, no reader waits, and the
    chunk is the largest. Drafts have a cost of their own, since a sequence has many of them, each
    with logits. Without it the fit would blame prompt tokens or sequences. Of the chunk they take
    what prompts leave, so a step with both ends in time, too.

    The costs are followed by a :class:`CostFit`. Attention makes a token dearer with its
    position: the fit follows that, too, as it is about steps just made.

    Beyond what was measured the model is trusted for a factor of two only.

    Args:
        target_s: how long a step in which others decode should take.
        least, most: bounds of the chunk, in tokens.
    """

    _GROWTH = 2

    def __init__(self, target_s: float, least: int, most: int) -> None:
        self._target_s = target_s
        self._least, self._most = least, most
        self._fit = CostFit((1, least, 1, 1))
        self._decoding = 0
        self._tried = least
        self._untaught = 0

    def limit(self, running: int) -> int:
        """Tokens that the next step may compute beyond one of each of ``running`` sequences."""
        decoding = min(self._decoding, running)
        if not decoding:
            return self._most
        base, per_token, per_sequence, _ = self._fit.costs
        left = self._target_s - base - per_sequence * decoding
        most = min(self._most, self._GROWTH * self._tried)
        if left <= 0:
            return self._least
        if left >= per_token * most:
            return most
        return max(self._least, int(left / per_token))

    def predict(self, tokens: int, sequences: int, drafts: int = 0) -> float:
        """Seconds of a step.

        Args:
            tokens: of it beyond one of each sequence, drafts not counted.
            sequences: it has.
            drafts: that it verifies.
        """
        return self._fit.predict((1, tokens, sequences, drafts))

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from a step; the time of a draft model is no part of ``seconds``."""
        spans = plan.spans
        tokens = sum([span.num_tokens for span in spans]) - len(spans)
        # A sequence that got a token wants the next one. (Some have ended: the count errs upwards.)
        self._decoding = sum([span.samples for span in spans])
        self._untaught = 0 if tokens else (self._untaught + 1) % _DECODES_A_LESSON
        if seconds > 0 and not self._untaught:
            self.learn(tokens, len(spans), seconds, sum([span.num_drafts for span in spans]))

    def learn(self, tokens: int, sequences: int, seconds: float, drafts: int = 0) -> None:
        """Learn that a step took so long; the arguments are those of :meth:`predict`."""
        self._tried = max(self._tried, min(tokens, self._most))
        self._fit.learn((1, tokens, sequences, drafts), seconds)

    @property
    def token_seconds(self) -> float:
        """What one more token in a step costs, by what was learned."""
        return self._fit.costs[1]

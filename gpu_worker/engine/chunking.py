"""How many prompt tokens a step may compute, so that those which decode are not kept waiting."""

from __future__ import annotations

import math

from .plan import Plan

__all__ = ["AdaptiveChunks"]


class AdaptiveChunks:
    """As many as let the step end in time: a model of its cost, fitted while it is used.

    A step over ``n`` sequences with ``p`` tokens beyond one of each is taken to cost
    ``a + b p + c n`` seconds; solved for the target, that is the chunk. The more sequences decode,
    the less is left for prompts; while none decodes nobody waits for a token, and the chunk is the
    largest.

    The three costs are followed by a Kalman filter (1960) over a random walk: unlike least squares
    with forgetting it forgets only in the direction in which it learns, so that hours of pure
    decoding do not wipe out what a prompt token costs. What is further off than expected moves it
    only as far as the expected would (Huber, 1964), so a pause of the machine is not taken for a
    dear token, while a change that stays is followed within some ten steps. Attention makes a
    token dearer with its position: the fit follows that, too, as it is about steps just made.

    Beyond what was measured the model is trusted for a factor of two only.

    Args:
        target_s: how long a step in which others decode should take.
        least, most: bounds of the chunk, in tokens.
    """

    _GROWTH = 2
    _DRIFT = 1e-3
    """Variance that each cost gains in a step, as a share of what it had at first."""
    _OUTLIER = 3.0
    """Standard deviations beyond which a measurement is cut."""
    _LEAST_NOISE = 0.02
    """Standard deviation of a step of equal work, as a share of its time, at least."""
    _NOISE_PACE = 0.05

    def __init__(self, target_s: float, least: int, most: int) -> None:
        self._target_s = target_s
        self._least, self._most = least, most
        self._costs = [0.0, 0.0, 0.0]  # a, b, c
        self._variance = [[0.0] * 3 for _ in range(3)]
        self._first: list[float] = []  # variances at the begin, which are not exceeded
        self._noise = 0.0
        self._decoding = 0
        self._tried = least

    def limit(self, running: int) -> int:
        """Tokens that the next step may compute beyond one of each of ``running`` sequences."""
        decoding = min(self._decoding, running)
        if not decoding:
            return self._most
        base, per_token, per_sequence = self._costs
        left = self._target_s - base - per_sequence * decoding
        most = min(self._most, self._GROWTH * self._tried)
        if left <= 0:
            return self._least
        if left >= per_token * most:
            return most
        return max(self._least, int(left / per_token))

    def predict(self, tokens: int, sequences: int) -> float:
        """Seconds of a step over so many sequences, with so many tokens beyond one of each."""
        base, per_token, per_sequence = self._costs
        return base + per_token * tokens + per_sequence * sequences

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from a step."""
        spans = plan.spans
        tokens = sum([span.num_tokens for span in spans]) - len(spans)
        # Who was given a token wants the next one. (Some have ended: better too many than too few.)
        self._decoding = sum([span.samples for span in spans])
        if seconds > 0:
            self.learn(tokens, len(spans), seconds)

    def learn(self, tokens: int, sequences: int, seconds: float) -> None:
        """Learn that a step took so long; the arguments are those of :meth:`predict`."""
        self._tried = max(self._tried, min(tokens, self._most))
        if not self._first:
            self._begin(tokens, sequences, seconds)
        variance = self._variance
        work = (1.0, float(tokens), float(sequences))
        spread = [sum([row[j] * work[j] for j in range(3)]) for row in variance]
        expected = sum([work[i] * spread[i] for i in range(3)])
        off = seconds - self.predict(tokens, sequences)
        noise = max(self._noise, self._LEAST_NOISE * seconds)
        bound = self._OUTLIER * math.sqrt(expected + noise * noise)
        off = max(-bound, min(bound, off))
        self._noise += self._NOISE_PACE * (min(abs(off), self._OUTLIER * noise) - self._noise)
        scale = 1 / (expected + noise * noise)
        for i in range(3):
            self._costs[i] += spread[i] * scale * off
            for j in range(3):
                variance[i][j] -= spread[i] * spread[j] * scale
        self._no_cost_is_negative()
        self._drift()

    def _no_cost_is_negative(self) -> None:
        """Move to the likeliest costs of which none is below zero.

        One after the other is set to zero, and the others by what is known of them together with
        it; what that leaves below zero, by rounding or a second time, is cut.
        """
        costs, variance = self._costs, self._variance
        for i in range(3):
            if costs[i] < 0 < variance[i][i]:
                lift = -costs[i] / variance[i][i]
                for j in range(3):
                    costs[j] += variance[j][i] * lift
        self._costs = [max(0.0, cost) for cost in costs]

    def _begin(self, tokens: int, sequences: int, seconds: float) -> None:
        """Nothing is known: any of the three may have been all of the first step's time."""
        amounts = (1, max(tokens, self._least), sequences)
        self._first = [(seconds / amount) ** 2 for amount in amounts]
        self._noise = self._LEAST_NOISE * seconds
        for i in range(3):
            self._variance[i][i] = self._first[i]

    def _drift(self) -> None:
        """The costs may have changed since, but are never less sure than they were at first."""
        variance = self._variance
        for i in range(3):
            most = self._first[i]
            variance[i][i] += self._DRIFT * most
            if variance[i][i] > most:
                shrink = math.sqrt(most / variance[i][i])
                for j in range(3):
                    variance[i][j] *= shrink
                    variance[j][i] *= shrink

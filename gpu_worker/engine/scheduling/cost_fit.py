"""Costs per unit of work, learned from measured durations."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["CostFit"]


class CostFit:
    """Seconds as a sum of amounts times costs, where the costs may change.

    A Kalman filter (1960) over a random walk follows the costs. Unlike least squares with
    forgetting, it forgets only in the direction in which it learns. So hours of pure decoding do
    not wipe out what a prompt token costs. A measurement that is too far off is cut to what could
    be expected (Huber, 1964). So one pause of the machine makes no token dear, while the filter
    follows a lasting change within some ten steps.

    Args:
        least: of each amount, what the first measurement counts at least: any one cost may explain
            all of its time, spread over this amount.
    """

    _DRIFT = 1e-3
    """Variance that each cost gains in a step, as a share of what it had at first."""
    _OUTLIER = 3.0
    """Standard deviations beyond which a measurement is cut."""
    _LEAST_NOISE = 0.02
    """Standard deviation of equal work, as a share of its time, at least."""
    _NOISE_PACE = 0.05

    def __init__(self, least: Sequence[float]) -> None:
        self._least = tuple(least)
        self._indices = range(len(self._least))
        self._variance = [[0.0] * len(self._least) for _ in self._least]
        self._first: list[float] = []  # variances at the begin, which are not exceeded
        self._noise = 0.0
        self.costs = [0.0] * len(self._least)

    @property
    def known(self) -> bool:
        """Whether anything was learned."""
        return bool(self._first)

    def predict(self, amounts: Sequence[float]) -> float:
        """Seconds of so much work."""
        return sum(map(float.__mul__, self.costs, map(float, amounts)))

    def learn(self, amounts: Sequence[float], seconds: float) -> None:
        """So much work took so long; a clock that has not moved tells nothing."""
        if seconds <= 0:
            return
        if not self._first:
            self._begin(amounts, seconds)
        variance, indices = self._variance, self._indices
        spread = [sum([row[j] * amounts[j] for j in indices]) for row in variance]
        expected = sum([amounts[i] * spread[i] for i in indices])
        off = seconds - self.predict(amounts)
        noise = max(self._noise, self._LEAST_NOISE * seconds)
        bound = self._OUTLIER * math.sqrt(expected + noise * noise)
        off = max(-bound, min(bound, off))
        self._noise += self._NOISE_PACE * (min(abs(off), self._OUTLIER * noise) - self._noise)
        scale = 1 / (expected + noise * noise)
        for i in indices:
            self.costs[i] += spread[i] * scale * off
            for j in indices:
                variance[i][j] -= spread[i] * spread[j] * scale
        self._no_cost_is_negative()
        self._drift()

    def _no_cost_is_negative(self) -> None:
        """Move to the likeliest costs of which none is below zero.

        Sets each negative cost to zero in turn, and corrects the others by their covariance with
        it. Cuts what is still below zero then.
        """
        costs, variance = self.costs, self._variance
        for i in self._indices:
            if costs[i] < 0 < variance[i][i]:
                lift = -costs[i] / variance[i][i]
                for j in self._indices:
                    costs[j] += variance[j][i] * lift
        self.costs = [max(0.0, cost) for cost in costs]

    def _begin(self, amounts: Sequence[float], seconds: float) -> None:
        """Nothing is known: any cost may have been all of the first measurement's time."""
        work = map(max, amounts, self._least)
        self._first = [(seconds / amount) ** 2 for amount in work]
        self._noise = self._LEAST_NOISE * seconds
        for i in self._indices:
            self._variance[i][i] = self._first[i]

    def _drift(self) -> None:
        """The costs may have changed since, but are never less sure than they were at first."""
        variance = self._variance
        for i in self._indices:
            most = self._first[i]
            variance[i][i] += self._DRIFT * most
            if variance[i][i] > most:
                shrink = math.sqrt(most / variance[i][i])
                for j in self._indices:
                    variance[i][j] *= shrink
                    variance[j][i] *= shrink

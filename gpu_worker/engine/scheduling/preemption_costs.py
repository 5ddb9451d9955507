"""Whether the KV of a preempted sequence is better copied away or computed again."""

from __future__ import annotations

from .adaptive_chunks import AdaptiveChunks
from .cost_fit import CostFit

__all__ = ["PreemptionCosts"]


class PreemptionCosts:
    """Compares by what this device was measured to take.

    Computing again costs a time per token, learned from the steps so far. A swap costs a time per
    copy, there and back, and a time per block. Part of what was preempted comes back from the
    prefix cache. It is neither computed nor copied back, but was copied out all the same. So
    swapping pays where a block costs little against its tokens and few blocks stay on the device.
    Computing again pays where sequences are short, the bus is slow, or the cache keeps them.

    Args:
        steps: learns what a token costs.
    """

    _PACE = 0.1
    """Weight of one return in the share that the prefix cache gives back."""
    _CURIOSITY = 0.03
    """What a swap that seems too dear may cost, to measure it anew. This is a share of the time
    spent on recomputing since the last swap."""

    def __init__(self, steps: AdaptiveChunks) -> None:
        self._steps = steps
        self._copies = CostFit((1, 4))
        self._regained = 0.0
        self._spent = 0.0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether swapping ``num_blocks`` blocks costs less than computing ``num_tokens`` again."""
        missing = 1.0 - self._regained
        recompute = missing * num_tokens * self._steps.token_seconds
        swap = self._copies.predict((2, (1.0 + missing) * num_blocks))
        loss = swap - recompute
        chosen = not self._copies.known or loss < 0 or loss < self._CURIOSITY * self._spent
        self._spent = 0.0 if chosen else self._spent + recompute
        return chosen

    def observe_swaps(self, num_out: int, num_in: int, seconds: float) -> None:
        """The blocks that a step swapped held it up for so long."""
        self._copies.learn(((num_out > 0) + (num_in > 0), num_out + num_in), seconds)

    def observe_return(self, num_tokens: int, num_hit: int) -> None:
        """A preempted sequence was admitted again: so much of it was in the prefix cache."""
        self._regained += self._PACE * (num_hit / num_tokens - self._regained)

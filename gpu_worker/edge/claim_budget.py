"""How much more work a worker asks for: the rule that its edge and the simulator share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.protocol.states import BY_URGENCY, Lane, ModelKind
from penstock.shared.settings import Settings

__all__ = ["NO_CLAIMS", "Capacity", "ClaimBudget"]

_MOST_CLAIMED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much a worker takes on.

    Attributes:
        max_sequences: requests owned at the same time.
        claim_batch: requests claimed in one exchange at most.
        lease_ms: how long Redis believes a silent worker alive.
        heartbeat_ms: how often the lease is renewed when no exchange does it.
    """

    max_sequences: int
    claim_batch: int
    lease_ms: int
    heartbeat_ms: int

    @classmethod
    def of(cls, settings: Settings, kind: ModelKind) -> Capacity:
        """What settings say for a model of this kind.

        One that answers at once has the batches that run and one that gathers meanwhile, each of
        which may be claimed in one exchange.
        """
        worker, most, claimed = settings.worker, settings.engine.max_sequences, 0
        if kind is not ModelKind.GENERATE:
            claimed = settings.batcher.max_batch
            most = (settings.batcher.max_concurrent_batches + 1) * claimed
        return cls(
            max_sequences=most,
            claim_batch=min(_MOST_CLAIMED, max(worker.claim_batch, claimed)),
            lease_ms=worker.lease_ms,
            heartbeat_ms=worker.heartbeat_interval_ms,
        )


@dataclass(frozen=True, slots=True)
class ClaimBudget:
    """How many more requests a worker can run, and of which lanes.

    Attributes:
        requests: how many.
        least_urgent: of this lane, and of all more urgent ones.
    """

    requests: int
    least_urgent: Lane

    @classmethod
    def beside(
        cls,
        owned: Mapping[str, int],
        waiting: Mapping[Lane, int],
        arriving_tokens: int,
        *,
        max_sequences: int,
        claim_batch: int,
        step_tokens: int,
    ) -> ClaimBudget:
        """What to ask for beside what the worker has.

        The engine lets urgent work displace the rest. So each lane counts only sequences that are
        at least as urgent. A worker claims down to the least urgent lane that has a sequence left.

        A worker does not hoard: a claimed request that only waits here could run elsewhere. So it
        asks for more only while everything as urgent that it claimed before is running, and while
        new prompts do not fill a step.

        Args:
            owned: sequences of requests claimed and not ended, by lane; lanes without any may be
                missing.
            waiting: those of them without KV blocks, in the same form.
            arriving_tokens: tokens of claimed prompts whose first step has not ended.
            max_sequences: sequences that the worker runs at the same time.
            claim_batch: requests claimed in one exchange at most.
            step_tokens: query tokens of a step at most.
        """
        budget, busy = NO_CLAIMS, 0
        if arriving_tokens >= step_tokens:
            return budget
        for lane in BY_URGENCY:
            busy += owned.get(lane, 0)
            free = min(claim_batch, max_sequences - busy)
            if free <= 0 or waiting.get(lane, 0):
                break
            budget = cls(free, lane)
        return budget


NO_CLAIMS = ClaimBudget(0, Lane.CRITICAL)

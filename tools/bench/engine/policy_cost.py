"""The cost of an admission policy beside many waiting sequences."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.scheduling.policies.policy import Policy
from penstock.gpu_worker.engine.scheduling.policies.registry import make_policy
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.sampling_options import SamplingOptions

from ...rounds import Rounds

__all__ = ["measure_policies", "policy_limits"]

_TENANTS = 50
_CONTEXT = 4096
_MOST_US = 50
_FEW = 8
"""Waiting sequences where the caller asks for 0: an empty queue admits none."""


def measure_policies(rounds: Rounds, waiting: Seq[int], *, repeats: int, turns: int) -> None:
    """CPU time of one arrival and one admission, by policy and number of waiting sequences.

    Lengths, tenants and deadlines are mixed. Each turn adds one, admits the first and ends it.
    """
    queues = {
        (name, count): (_filled(name, count), _Arrivals(count))
        for name in PolicyName
        for count in waiting
    }
    for _ in range(repeats):
        for (name, count), (policy, arrivals) in queues.items():
            rounds.add(f"policy_us_{name}_{count}", _turn_us(policy, arrivals, turns))


def policy_limits(waiting: Seq[int]) -> list[tuple[str, int]]:
    """Limits of the figures in microseconds, whatever the number of waiting sequences."""
    return [(f"policy_us_{name}_{count}", _MOST_US) for name in PolicyName for count in waiting]


class _Arrivals:
    """Draws sequences, one a millisecond, with the same few options."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._options = [SamplingOptions(max_tokens=16 << index) for index in range(8)]
        self._made = 0

    def next(self) -> Sequence:
        rng = self._rng
        self._made += 1
        now = self._made / 1000
        return Sequence(
            id=str(self._made),
            prompt_ids=(1,),
            options=rng.choice(self._options),
            tenant=f"tenant-{rng.randrange(_TENANTS)}",
            arrival=now,
            deadline=now + 60 * rng.random(),
        )


def _filled(name: PolicyName, count: int) -> Policy:
    config = EngineConfig(
        block_size=16,
        num_blocks=1,
        max_batch_tokens=1,
        max_sequences=1,
        chunk_size=1,
        max_model_len=_CONTEXT,
        eos_token_ids=frozenset(),
        policy=name,
    )
    policy, arrivals = make_policy(config), _Arrivals(-1)
    for _ in range(max(count, _FEW)):
        policy.add(arrivals.next())
    return policy


def _turn_us(policy: Policy, arrivals: _Arrivals, turns: int) -> float:
    coming = [arrivals.next() for _ in range(turns)]
    began = time.thread_time()
    for sequence in coming:
        policy.add(sequence)
        first = policy.peek()
        assert first is not None
        policy.admit(first)
        policy.end(first)
    return 1e6 * (time.thread_time() - began) / turns

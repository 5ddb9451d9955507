"""Sequences as they wait, and orders of admission over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from engine.fakes import config

from penstock.gpu_worker.engine.scheduling.policies.policy import Policy
from penstock.gpu_worker.engine.scheduling.policies.registry import make_policy
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

__all__ = ["BOUND_S", "drained", "filled", "make", "may_overtake", "sequence"]

BOUND_S = 8.0
"""A power of two, as are all times of these tests: sums are exact, so bounds can be, too."""


class Waits(Protocol):
    """A request or a sequence."""

    @property
    def arrival(self) -> float: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def tenant(self) -> str: ...


def sequence(
    id: str,
    lane: Lane = Lane.NORMAL,
    *,
    tenant: str = "a",
    arrival: float = 0.0,
    prompt: int = 1,
    max_tokens: int = 16,
    deadline: float | None = None,
    **options: Any,
) -> Sequence:
    return Sequence(
        id=id, prompt_ids=[1] * prompt, options=SamplingOptions(max_tokens=max_tokens, **options),
        lane=lane, tenant=tenant, arrival=arrival, deadline=deadline,
    )  # fmt: skip


def may_overtake(name: PolicyName, bound: float, late: Waits, left: Waits) -> bool:
    """Whether, of one lane, ``late`` may be admitted first, for when both arrived."""
    if name is PolicyName.FCFS:
        return True  # whoever was added first
    if name is PolicyName.FAIR and late.tenant == left.tenant:
        return late.arrival <= left.arrival
    if name is PolicyName.FAIR and bound:
        return True  # as often as turns allow
    if name is PolicyName.EDF and bound and left.deadline is not None:
        return late.arrival <= max(left.arrival, left.deadline)
    return late.arrival <= left.arrival + bound


def make(name: str, **changes: object) -> Policy:
    limits = {"policy": PolicyName(name), "max_overtake_s": BOUND_S, "max_model_len": 64}
    return make_policy(config(**{**limits, **changes}))


def filled(name: str, sequences: Iterable[Sequence], **changes: object) -> Policy:
    policy = make(name, **changes)
    for seq in sequences:
        policy.add(seq)
    return policy


def drained(policy: Policy) -> list[str]:
    order = []
    while (first := policy.peek()) is not None:
        policy.admit(first)
        order.append(first.id)
    return order

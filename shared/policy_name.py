"""The orders in which a worker admits waiting requests, as settings and users name them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

__all__ = ["PolicyName"]


class PolicyName(StrEnum):
    """Orders of admission; the engine makes each in ``scheduling/policies/registry.py``.

    Attributes:
        effect: what is admitted first, for the reference of settings.
    """

    effect: str

    def __new__(cls, name: str, effect: str = "") -> Self:
        """A member: a name with its effect. To look one up, the name is enough."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.effect = effect
        return member

    FCFS = "fcfs", "first come, first served"
    SJF = "sjf", "fewest steps left first"
    PRIORITY = (
        "priority",
        "by waiting time, length and lane together, so `batch` gets its turn behind `critical`",
    )
    FAIR = "fair", "tenants in turns, by tokens"
    EDF = "edf", "earliest deadline first"

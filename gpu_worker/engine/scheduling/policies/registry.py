"""From the name of an order to its policy."""

from __future__ import annotations

from ...config import EngineConfig, PolicyName
from .bounded import Bounded
from .edf import EarliestDeadline
from .fair import TenantFair
from .fcfs import Fcfs
from .policy import Policy
from .priority import Composite
from .ranked import Lengths
from .sjf import ShortestFirst

__all__ = ["make_policy"]


def make_policy(config: EngineConfig) -> Policy:
    """The order of admission that ``config.policy`` names, under which nobody starves."""
    return Bounded(_order(config), config.max_overtake_s)


def _order(config: EngineConfig) -> Policy:
    lengths = Lengths(config.max_model_len, config.max_span)
    match config.policy:
        case PolicyName.FCFS:
            return Fcfs()
        case PolicyName.SJF:
            return ShortestFirst(config.max_overtake_s, lengths)
        case PolicyName.PRIORITY:
            return Composite(config.max_overtake_s, lengths)
        case PolicyName.FAIR:
            return TenantFair(config.max_overtake_s)
        case PolicyName.EDF:
            return EarliestDeadline(config.max_overtake_s)

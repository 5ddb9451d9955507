"""From the name of an order to its policy."""

from __future__ import annotations

from penstock.shared.policy_name import PolicyName

from ...config import EngineConfig
from .bounded import BoundedPolicy
from .edf import EdfPolicy
from .fair import FairPolicy
from .fcfs import FcfsPolicy
from .policy import Policy
from .priority import PriorityPolicy
from .ranked import Lengths
from .sjf import SjfPolicy

__all__ = ["make_policy"]


def make_policy(config: EngineConfig) -> Policy:
    """The order of admission that ``config.policy`` names, with a bound on every wait."""
    return BoundedPolicy(_order(config), config.max_overtake_s)


def _order(config: EngineConfig) -> Policy:
    lengths = Lengths(config.max_model_len, config.max_span)
    match config.policy:
        case PolicyName.FCFS:
            return FcfsPolicy()
        case PolicyName.SJF:
            return SjfPolicy(config.max_overtake_s, lengths)
        case PolicyName.PRIORITY:
            return PriorityPolicy(config.max_overtake_s, lengths)
        case PolicyName.FAIR:
            return FairPolicy(config.max_overtake_s)
        case PolicyName.EDF:
            return EdfPolicy(config.max_overtake_s)

"""A fleet in virtual time: the real engine and the real order of claims, without a device.

Read in this order: ``workload`` (what is asked), ``cost`` and ``fitted`` (how long a step takes),
``lanes`` (who is next), ``node`` (one worker), ``fleet`` (the clock), ``dispatch`` (who gets what),
``measures``, ``scenario`` (one run), ``comparison``, ``command``, ``view`` and ``plot``.
"""

from .arrivals import Generator, Lengths, SimRequest, read_trace, write_trace
from .claim_order import FairQueue
from .dispatch import Dispatch
from .fleet import Run
from .measures import ServiceLevel
from .scenario import Outcome, Scenario, simulate
from .step_time import HARDWARE, MODELS, ConstantCost, CostModel, Hardware, ModelShape, Roofline

__all__ = [
    "HARDWARE",
    "MODELS",
    "ConstantCost",
    "CostModel",
    "Dispatch",
    "FairQueue",
    "Generator",
    "Hardware",
    "Lengths",
    "ModelShape",
    "Outcome",
    "Roofline",
    "Run",
    "Scenario",
    "ServiceLevel",
    "SimRequest",
    "read_trace",
    "simulate",
    "write_trace",
]

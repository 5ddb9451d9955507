"""A fleet in virtual time: the real engine and the real order of claims, without a device.

Begin with ``arrivals`` (the requests), ``step_time`` and ``fitted_step_time`` (the cost of a step),
``claim_order`` and ``node`` (one worker). Then read ``fleet`` (the clock), ``dispatch`` (which
worker gets a request), ``measures``, ``scenario`` (one run) and ``report/``.
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

"""In which order waiting sequences are admitted: one interface, and a class for each order.

``policy`` is the interface and says what every order must keep. ``fcfs`` and ``fair`` have queues
of their own; ``sjf``, ``edf`` and ``priority`` only say where a sequence stands (``ranked``).
"""

from .bounded import Bounded
from .edf import EarliestDeadline
from .fair import TenantFair
from .fcfs import Fcfs
from .policy import BY_URGENCY, Policy
from .priority import Composite
from .registry import make_policy
from .sjf import ShortestFirst

__all__ = [
    "BY_URGENCY",
    "Bounded",
    "Composite",
    "EarliestDeadline",
    "Fcfs",
    "Policy",
    "ShortestFirst",
    "TenantFair",
    "make_policy",
]

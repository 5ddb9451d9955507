"""In which order waiting sequences are admitted: one interface, and a class for each order.

``policy`` is the interface and says what every order must keep. ``fcfs`` and ``fair`` have queues
of their own; ``sjf``, ``edf`` and ``priority`` only say where a sequence stands (``ranked``).
"""

from .bounded import BoundedPolicy
from .edf import EdfPolicy
from .fair import FairPolicy
from .fcfs import FcfsPolicy
from .policy import BY_URGENCY, Policy
from .priority import PriorityPolicy
from .registry import make_policy
from .sjf import SjfPolicy

__all__ = [
    "BY_URGENCY",
    "BoundedPolicy",
    "EdfPolicy",
    "FairPolicy",
    "FcfsPolicy",
    "Policy",
    "PriorityPolicy",
    "SjfPolicy",
    "make_policy",
]

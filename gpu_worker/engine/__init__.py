"""The pure engine: which tokens to compute next, in which blocks, and when a request ends.

No file here imports Redis, asyncio or torch, so everything can be tested in milliseconds and
simulated in virtual time. Read in this order: ``sequence``, ``plan``, ``engine``, ``scheduler``,
``policies``, ``chunking`` (with ``cost_fit``), ``blocks`` (with ``free_list``, ``prefix_cache`` and
``kinds``; ``hybrid_blocks`` for models whose layers differ in how far back they see), ``swap``
(with ``preemption``), ``output`` and ``text``; then, for requests with several outputs,
``open_group``, ``group``, ``best_of``, ``beam_group`` and ``beam``; then ``speculation`` (with
``drafting`` and ``speculation_*``).
"""

from .blocks import BlockManager
from .chunking import AdaptiveChunks
from .config import Chunking, EngineConfig, PolicyName
from .engine import Engine
from .form import Form
from .hybrid_blocks import HybridBlocks
from .kinds import NO_BLOCK, KVKind
from .plan import BlockCopy, Plan, Span, StepOutput
from .policies import (
    Composite,
    EarliestDeadline,
    Fcfs,
    Policy,
    ShortestFirst,
    TenantFair,
    make_policy,
)
from .requests import EngineRequest, Finish, Update
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .speculation import SpeculationConfig, SpeculationStats
from .speculation_cost import Calibration, StepTiming
from .stats import EngineStats, PoolUse, Preemption, PreemptionCause, PreemptionMode
from .swap import HostPool
from .text import StopMatcher, TextStream

__all__ = [
    "NO_BLOCK",
    "AdaptiveChunks",
    "BlockCopy",
    "BlockManager",
    "Calibration",
    "Chunking",
    "Composite",
    "EarliestDeadline",
    "Engine",
    "EngineConfig",
    "EngineRequest",
    "EngineStats",
    "Fcfs",
    "Finish",
    "Form",
    "HostPool",
    "HybridBlocks",
    "KVKind",
    "Plan",
    "Policy",
    "PolicyName",
    "PoolUse",
    "Preemption",
    "PreemptionCause",
    "PreemptionMode",
    "Scheduler",
    "Sequence",
    "SequenceStatus",
    "ShortestFirst",
    "Span",
    "SpeculationConfig",
    "SpeculationStats",
    "StepOutput",
    "StepTiming",
    "StopMatcher",
    "TenantFair",
    "TextStream",
    "Update",
    "make_policy",
]

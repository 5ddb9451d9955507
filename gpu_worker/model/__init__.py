"""The model: everything that touches tensors."""

from .kv_pool import KVPool, blocks_in_budget
from .loader import LoadedModel, load_model
from .memory import kv_budget
from .runner import ModelRunner

__all__ = [
    "KVPool",
    "LoadedModel",
    "ModelRunner",
    "blocks_in_budget",
    "kv_budget",
    "load_model",
]

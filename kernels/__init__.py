"""Tensor functions over the paged key/value cache: one op, one file.

Each op's public function states shapes, dtypes, formula and source, and picks its Triton kernel or
its torch path by the tensors' device.
"""

from __future__ import annotations

from .kv_write import write_kv
from .paged_attention import paged_attention
from .quantized_linear import PackedWeight, quantized_linear
from .ragged import RaggedBatch
from .workspace import AttentionWorkspace

__all__ = [
    "AttentionWorkspace", "PackedWeight", "RaggedBatch", "paged_attention", "quantized_linear",
    "write_kv",
]  # fmt: skip

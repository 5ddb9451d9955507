"""What the tensors of a checkpoint take in memory once loaded, by their headers alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..quantization.formats.stored_tensors import FULL
from .checkpoint_folder import safetensors_files

__all__ = ["RESERVE", "loaded_bytes", "usable_bytes"]

RESERVE = 0.1
"""Of the memory: activations, tokenizer and the process itself need some, too."""

_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
         "I16": 16, "U16": 16, "F4": 4}  # fmt: skip


def loaded_bytes(checkpoint: Path, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's weights in memory, if they are not quantised.

    Args:
        checkpoint: its directory.
        dtype: that the model's numbers are converted to.

    Returns:
        Bytes; 0 where no file tells.
    """
    return sum(_file_bytes(path, dtype) for path in safetensors_files(checkpoint))


def usable_bytes(memory: int) -> int:
    """What weights, keys and values may take of ``memory`` bytes."""
    return int(memory * (1 - RESERVE))


def _file_bytes(path: Path, dtype: torch.dtype) -> int:
    total = 0
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                stored, count = part.get_dtype(), torch.Size(part.get_shape()).numel()
                bits = 8 * dtype.itemsize if stored in FULL else _BITS.get(stored, 8)
                total += count * bits // 8
    except (SafetensorError, OSError):
        return 0  # reading the file says what is wrong with it
    return total

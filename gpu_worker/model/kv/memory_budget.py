"""How much memory the KV pool and the swap pool may take."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from penstock.shared.errors import ConfigurationError, InsufficientMemory
from penstock.shared.local.control_groups import memory_left

__all__ = [
    "available_bytes",
    "format_bytes",
    "kv_budget",
    "parse_bytes",
    "release_unused",
    "swap_budget",
]

CPU_SHARE = 0.25
"""Of the memory available when the worker starts: other programs need some, too."""

CPU_LIMIT = 1 << 30
"""Enough for thousands of small sequences; a worker on a laptop takes no more by default."""

CUDA_SHARE = 0.9
"""Of the memory free once the weights are loaded; activations and the allocator need the rest."""

SWAP_SHARE = 0.125
"""Of the host's available memory."""

SWAP_LIMIT = 4 << 30
"""Pinned memory is taken at start, and the system cannot swap it: no more of it by default."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1 << (10 * _power)
    _UNITS[f"{_letter}B"] = 10 ** (3 * _power)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(setting: str | int) -> int:
    """Bytes from ``"512MiB"``, ``"2GB"``, ``"1048576"`` or an integer.

    Raises:
        ConfigurationError: it is not a positive size.
    """
    match = _SIZE.fullmatch(str(setting))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise ConfigurationError(
            f"memory size: got {setting!r}; allowed: a positive number of bytes with an optional "
            "unit, such as 512MiB, 2GiB or 1.5GB"
        )
    return size


def format_bytes(size: int) -> str:
    """``size`` for a person, in binary units: ``"1.5 GiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def available_bytes(device: torch.device) -> int:
    """Memory that ``device`` can give now without evicting anything."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_meminfo(), memory_left()) if limit is not None]
    if limits:
        return min(limits)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_budget(setting: str | int | None, device: torch.device, *, reserved: int = 0) -> int:
    """Bytes for the KV pool.

    Args:
        setting: a size as :func:`parse_bytes` takes it. None takes a quarter of the available
            memory on CPU, at most 1 GiB. On CUDA it takes nine tenths of what is free, so load the
            weights first.
        device: where the pool will lie.
        reserved: bytes that count as available and are needed: weights mapped from a file.

    Raises:
        ConfigurationError: ``setting`` is not a size.
        InsufficientMemory: ``setting`` is more than the device has available.
    """
    available = max(0, available_bytes(device) - reserved)
    if setting is None:
        if device.type == "cuda":
            return int(available * CUDA_SHARE)
        return min(int(available * CPU_SHARE), CPU_LIMIT)
    budget = parse_bytes(setting)
    if budget > available:
        raise InsufficientMemory(
            f"engine.kv_memory is {format_bytes(budget)}, more than {device} has available "
            f"({format_bytes(available)}); lower it, or leave it out to take a part of that"
        )
    return budget


def swap_budget(setting: int | None, kv_bytes: int, device: torch.device) -> int:
    """Bytes of host memory for swapped KV.

    Args:
        setting: bytes; None takes as much as the KV pool has, but at most an eighth of what the
            host has available and 4 GiB.
        kv_bytes: of the KV pool.
        device: where that lies. Beside CUDA the answer is a power of two. PyTorch's allocator of
            pinned memory rounds up to one, and could take nearly twice what was asked for.

    Raises:
        InsufficientMemory: ``setting`` is more than the host has available.
    """
    available = available_bytes(torch.device("cpu"))
    if setting is None:
        budget = min(kv_bytes, int(available * SWAP_SHARE), SWAP_LIMIT)
    elif setting > available:
        raise InsufficientMemory(
            f"engine.swap_memory is {format_bytes(setting)}, more than the host has available "
            f"({format_bytes(available)}); lower it"
        )
    else:
        budget = setting
    return 1 << (budget.bit_length() - 1) if device.type == "cuda" and budget else budget


def release_unused(device: torch.device) -> None:
    """Wait for all queued work, and give the memory of freed tensors back to ``device``.

    Torch does so itself before it raises for lack of memory. But the tensors of a failed step are
    freed only later, and cuBLAS allocates memory, too.

    Raises:
        RuntimeError: the device is lost, as one is after an illegal access.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _meminfo() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None

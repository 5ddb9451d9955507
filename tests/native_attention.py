"""Shapes and options of attention over the paged cache, and a reference in float64."""

from __future__ import annotations

from typing import Any

import torch
from native_programs import SETS, AttentionProgram
from torch import Tensor

from penstock.kernels.cpu import HeadShape

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SHAPES = {
    "mha": HeadShape(3, 3, 8, 8),
    "gqa": HeadShape(6, 2, 32, 32),
    "mqa": HeadShape(5, 1, 20, 20),
    "unequal": HeadShape(4, 2, 24, 40),
    "odd": HeadShape(2, 1, 7, 9),
    "many-heads": HeadShape(52, 1, 16, 16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 21},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 5, "softcap": 2.0, "sinks": True},
}
LENGTH = 130


def table(shape: HeadShape, dtype: torch.dtype, rows: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, shape.columns, generator=generator).to(dtype)


def sinks(shape: HeadShape) -> Tensor:
    return torch.linspace(-2, 2, shape.heads)


def split(rows: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[T, heads, dim]``."""
    q, k, v = rows.split(
        [shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim,
         shape.kv_heads * shape.value_dim], dim=1,
    )  # fmt: skip
    return (
        q.unflatten(1, (shape.heads, -1)),
        k.unflatten(1, (shape.kv_heads, -1)),
        v.unflatten(1, (shape.kv_heads, -1)),
    )


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """All positions of one sequence, ``[T, heads, value dim]`` in float64."""
    group, count = q.shape[1] // k.shape[1], len(q)
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(count)[:, None] - torch.arange(count)[None]
    seen = (distance >= 0) & (distance < (count if window is None else window))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, count, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def program(
    shape: HeadShape, dtype: torch.dtype, name: str = SETS[0], block_size: int = 16, **options: Any
) -> AttentionProgram:
    if options.pop("sinks", None):
        options["sinks"] = sinks(shape)
    rows = table(shape, dtype)
    return AttentionProgram(
        rows.float(), shape, dtype, name, block_size, num_blocks=3 * LENGTH // block_size + 9,
        scale=shape.key_dim**-0.5, **options,
    )  # fmt: skip


def blocks(which: int, block_size: int) -> list[int]:
    """The blocks of one of three sequences: interleaved, backwards."""
    count = -(-LENGTH // block_size)
    return [3 * (count - 1 - i) + which for i in range(count)]


def compare(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert float((found.double() - expected).abs().max()) <= TOLERANCE[dtype] * float(
        expected.abs().max()
    )

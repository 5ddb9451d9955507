"""Small programs of the native library, and their steps, for tests.

With ``NATIVE_SANITISERS`` in the environment the library is one that reports every access outside
its memory and all undefined behaviour, as ``make check-native`` wants it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import RaggedBatch
from penstock.kernels.cpu import (
    LOGITS,
    BoundStep,
    HeadShape,
    Library,
    NativeProgram,
    ThreadPool,
    compiler,
    load_library,
    supported_sets,
)
from penstock.kernels.kv_layout import KVLayout

DTYPES = [torch.float32, torch.bfloat16]
SETS = supported_sets()


SANITISERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g1")
"""With ``-O2 -g`` the unrolled tiles of one file compile for over five minutes."""


@cache
def library(name: str = SETS[0]) -> Library:
    if os.environ.get("NATIVE_SANITISERS"):
        return Library(compiler.build(name, extra_flags=SANITISERS))
    return load_library(name)


@cache
def pool(name: str = SETS[0], threads: int = 2) -> ThreadPool:
    return ThreadPool(library(name), threads)


@dataclass(frozen=True)
class Span:
    """Rows ``start .. start + len(tokens)`` of a sequence, whose blocks these are."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


def run(
    program: NativeProgram,
    threads: ThreadPool,
    spans: Sequence[Span],
    caches: tuple[tuple[Tensor, Tensor], ...],
    width: int,
    *,
    block_size: int = 16,
    rows: Sequence[int] | None = None,
    window: int | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Logits ``[rows, width]`` of one step; None: of all rows.

    The largest of each row, found while they are computed, are those that are found afterwards.
    """
    batch = RaggedBatch.from_lists(
        [len(span.tokens) for span in spans],
        [span.start + len(span.tokens) for span in spans],
        [span.table for span in spans],
        block_size=block_size,
        window=window,
    )
    tokens = torch.tensor([token for span in spans for token in span.tokens])
    wanted = torch.arange(len(tokens)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    logits = torch.full((len(wanted), width), torch.nan)
    cache = program.bind(caches, [0] * len(caches))
    largest = torch.empty(len(wanted)), torch.empty(len(wanted), dtype=torch.int64)
    program.run(threads, BoundStep.of(tokens, wanted, [batch], cache, logits, largest), meanwhile)
    values, places = threads.largest(logits)
    assert torch.equal(largest[0].nan_to_num(), values.nan_to_num())
    assert torch.equal(largest[0].isnan(), values.isnan())
    assert torch.equal(largest[1], places)
    return logits


def rowwise(program: NativeProgram, x: Tensor, width: int, threads: ThreadPool) -> Tensor:
    """Logits of a program without attention, whose embedding is ``x``."""
    count = len(x)
    return run(program, threads, [Span(range(count), 0, range(-(-count // 16)))], (), width)


def linear(
    name: str, x: Tensor, *weights: Tensor, gated: bool = False, threads: int = 2, **options: Any
) -> Tensor:
    """One linear layer over the rows of ``x``, which are float32; weights' dtype is its own."""
    program = NativeProgram(library(name), weights[0].dtype)
    rows = program.buffer(x.shape[1])
    multiplied = program.buffer(x.shape[1], multiplied=True, outputs=True)
    program.embed(x, rows)
    program.copy(rows, multiplied)
    matrix = program.matrix(*weights, gated=gated)
    width = weights[0].shape[0] if gated else sum(len(w) for w in weights)
    program.linear(matrix, multiplied, LOGITS, **options)
    return rowwise(program, x, width, pool(name, threads))


class AttentionProgram:
    """Attention alone: a token's queries, keys and values are a row of a table."""

    def __init__(
        self, table: Tensor, shape: HeadShape, dtype: torch.dtype, name: str = SETS[0],
        block_size: int = 16, num_blocks: int = 64, int8: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.shape, self.block_size, self.name = shape, block_size, name
        rotate = {key: options.pop(key) for key in ("rotary", "query_norm", "key_norm")
                  if key in options}  # fmt: skip
        program = NativeProgram(library(name), dtype)
        qkv = program.buffer(shape.columns)
        self.width = shape.heads * shape.value_dim
        mixed = program.buffer(self.width)
        multiplied = program.buffer(self.width, multiplied=True, outputs=True)
        program.embed(table, qkv)
        program.rotate(qkv, shape, 0, **rotate)
        program.attend(qkv, mixed, shape, 0, **options)
        program.copy(mixed, multiplied)
        program.linear(program.matrix(torch.eye(self.width)), multiplied, LOGITS)
        self.program = program
        layout = KVLayout.GROUPS
        if int8:
            layout, dtype = layout.in_format("int8"), torch.int8
            program.keep_cache_in_int8()
        keys = layout.key_shape(block_size, shape.kv_heads, shape.key_dim, dtype)
        values = layout.value_shape(block_size, shape.kv_heads, shape.value_dim)
        # Whatever is read that nobody wrote shows: bytes of -1 are scales that are no numbers.
        unwritten = -1 if int8 else torch.nan
        self.caches = (
            (
                torch.full((num_blocks, *keys), unwritten, dtype=dtype),
                torch.full((num_blocks, *values), unwritten, dtype=dtype),
            ),
        )

    def step(self, spans: Sequence[Span], *, threads: int = 2, window: int | None = None) -> Tensor:
        """[T, heads, value dim]."""
        out = run(
            self.program, pool(self.name, threads), spans, self.caches, self.width,
            block_size=self.block_size, window=window,
        )  # fmt: skip
        return out.view(-1, self.shape.heads, self.shape.value_dim)

"""Native attention over the paged cache against a reference, row by row in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_attention import (
    LENGTH,
    OPTIONS,
    SHAPES,
    blocks,
    compare,
    program,
    reference,
    sinks,
    split,
    table,
)  # fmt: skip
from native_programs import DTYPES, SETS, AttentionProgram, Span
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels.cpu import HeadShape, NormWeights, Rotary


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batches(shape: str, option: str, dtype: torch.dtype) -> None:
    heads, options = SHAPES[shape], OPTIONS[option]
    for name, block_size in zip(SETS, itertools.cycle((16, 5, 32, 1)), strict=False):
        subject = program(heads, dtype, name, block_size, **options)
        tables = [blocks(which, block_size) for which in range(3)]
        q, k, v = split(table(heads, dtype), heads)
        wanted = {**options, "sinks": sinks(heads)} if "sinks" in options else options
        expected = reference(q, k, v, heads.key_dim**-0.5, **wanted)
        # A prompt's chunk, a whole short prompt; then a decode, drafts and another chunk.
        first = [Span(range(90), 0, tables[0]), Span(range(37), 0, tables[1])]
        second = [
            Span([37], 37, tables[1]), Span(range(90, 95), 90, tables[0]),
            Span(range(21), 0, tables[2]),
        ]  # fmt: skip
        found = subject.step(first, window=options.get("window"))
        compare(found, torch.cat([expected[:90], expected[:37]]), dtype)
        found = subject.step(second, window=options.get("window"))
        compare(found, torch.cat([expected[37:38], expected[90:95], expected[:21]]), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [24, 10, 0])
def test_head_norms_and_rotary_positions(dims: int, interleaved: bool) -> None:
    shape, count = HeadShape(4, 2, 24, 24), 20
    angles = torch.outer(torch.arange(LENGTH), 2.0 ** -torch.arange(dims // 2))
    weight, over_all = torch.linspace(0.5, 2, 24), torch.linspace(0.5, 2, 48)
    q, k, v = split(table(shape, torch.float32)[:count], shape)
    expected_q = F.rms_norm(q.double(), (24,), weight.double(), 1e-5)
    expected_k = F.rms_norm(k.double().flatten(1), (48,), over_all.double(), 1e-5).view_as(k)

    def turn(x: Tensor) -> Tensor:
        half, out = dims // 2, x.clone()
        one, two = (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (
            slice(half), slice(half, dims))  # fmt: skip
        c, s = angles[:count, None].double().cos(), angles[:count, None].double().sin()
        out[..., one] = x[..., one] * c - x[..., two] * s
        out[..., two] = x[..., two] * c + x[..., one] * s
        return out

    expected = reference(turn(expected_q), turn(expected_k), v, 0.2)
    subject = AttentionProgram(
        table(shape, torch.float32), shape, torch.float32, scale=0.2,
        rotary=Rotary(angles.cos(), angles.sin(), interleaved) if dims else None,
        query_norm=NormWeights(24, 1e-5, weight), key_norm=NormWeights(48, 1e-5, over_all),
    )  # fmt: skip
    compare(subject.step([Span(range(count), 0, range(2))]), expected, torch.float32)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_bits_do_not_depend_on_chunks_neighbours_or_threads(
    name: str, dtype: torch.dtype, window: int | None
) -> None:
    shape = SHAPES["gqa"]
    tables = [blocks(which, 16) for which in range(3)]
    options = {} if window is None else {"window": window}

    def all_rows(chunks: list[int], *, others: bool = False, threads: int = 2) -> Tensor:
        subject, done, found = program(shape, dtype, name, **options), 0, []
        for size in chunks:
            spans = [Span(range(done, done + size), done, tables[0])]
            if others:
                spans.insert(0, Span(range(11), 0, tables[1]))
                spans.append(Span(range(done, done + 1), 0, tables[2]))
            out = subject.step(spans, threads=threads, window=window)
            found.append(out[11 : 11 + size] if others else out)
            done += size
        return torch.cat(found)

    whole = all_rows([LENGTH])
    assert torch.equal(all_rows([1] * LENGTH), whole)
    assert torch.equal(all_rows([7, 64, LENGTH - 71]), whole)
    assert torch.equal(all_rows([50, LENGTH - 50], others=True), whole)
    assert torch.equal(all_rows([50, LENGTH - 50], threads=1), whole)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("name", SETS)
def test_long_contexts_keep_their_sums_in_order(name: str, window: int | None) -> None:
    # Past several spans of scores, with the largest of them late. Alone a thread computes one span
    # after the other; of many threads each takes some, also of a single row.
    shape, length = HeadShape(2, 1, 16, 16), 1300
    rows = table(shape, torch.float32, length)
    rows[:, 32:48] *= torch.linspace(0.1, 4, length)[:, None]
    expected = reference(*split(rows, shape), 0.5, window=window)
    subject = AttentionProgram(
        rows, shape, torch.float32, name, num_blocks=82, scale=0.5, window=window
    )

    def in_steps(*ends: int, threads: int) -> Tensor:
        return torch.cat(
            [
                subject.step(
                    [Span(range(begin, end), begin, range(82))], threads=threads, window=window
                )
                for begin, end in itertools.pairwise((0, *ends))
            ]
        )

    whole = in_steps(length, threads=1)
    compare(whole, expected, torch.float32)
    assert torch.equal(in_steps(700, 701, length, threads=2), whole)
    for threads in (3, 8):
        assert torch.equal(in_steps(length - 1, length, threads=threads), whole)


@settings(max_examples=20, deadline=None)
@given(
    block_size=st.integers(1, 40), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    heads=st.integers(1, 3), group=st.integers(1, 5), dim=st.integers(1, 40),
    window=st.none() | st.integers(1, 70), dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(SETS),
)  # fmt: skip
def test_any_shape(
    block_size: int, lengths: list[int], heads: int, group: int, dim: int, window: int | None,
    dtype: torch.dtype, name: str,
) -> None:  # fmt: skip
    shape = HeadShape(heads * group, heads, dim, dim)
    subject = program(shape, dtype, name, block_size, window=window)
    expected = reference(*split(table(shape, dtype), shape), dim**-0.5, window=window)
    spans = [Span(range(n), 0, blocks(i, block_size)) for i, n in enumerate(lengths)]
    found = subject.step(spans, window=window)
    compare(found, torch.cat([expected[:n] for n in lengths]), dtype)

"""Keys and values in 8 bits: rounded, stored and attended to, by torch and natively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from native_programs import SETS, Span
from torch import Tensor

from penstock.kernels import RaggedBatch, paged_attention, write_kv
from penstock.kernels.kv_layout import (
    SCALE_BYTES,
    CacheShape,
    KVLayout,
    decode_fp8,
    decode_kv,
    encode_fp8,
    encode_kv,
)
from penstock.kernels.workspace import AttentionWorkspace


def rounded(states: Tensor) -> Tensor:
    return decode_kv(encode_kv(states), torch.float32)


def test_numbers_are_at_most_half_a_scale_off() -> None:
    states = torch.randn(50, 3, 40, generator=torch.Generator().manual_seed(0))
    states *= torch.logspace(-30, 30, 50)[:, None, None]
    scale = states.abs().amax(-1, keepdim=True) / 127
    # The scale is rounded up, by at most one part of 128.
    assert ((rounded(states) - states).abs() <= scale * 0.5 * (1 + 2**-7)).all()
    assert encode_kv(states)[..., :-SCALE_BYTES].abs().amax(-1).min() >= 126


def test_zeros_stay_and_what_is_not_finite_spoils_its_row_alone() -> None:
    states = torch.ones(4, 2, 8)
    states[0, 0], states[1, 1, 3], states[2, 0, 5] = 0, torch.nan, torch.inf
    found = rounded(states)
    assert (found[0, 0] == 0).all()
    spoilt = torch.zeros(4, 2, dtype=torch.bool)
    spoilt[1, 1] = spoilt[2, 0] = True
    assert torch.equal(~found.isfinite().all(-1), spoilt)
    torch.testing.assert_close(found[3], states[3], rtol=2**-7, atol=0)


def rounded_fp8(states: Tensor) -> Tensor:
    return decode_fp8(*encode_fp8(states), torch.float32)


def test_numbers_in_fp8_are_at_most_a_sixteenth_off() -> None:
    states = torch.randn(70, 3, 40, generator=torch.Generator().manual_seed(0))
    states *= torch.logspace(-30, 30, 70)[:, None, None] * torch.logspace(-9, 0, 40)
    states[0, 0] = torch.linspace(448, 448.01, 40)
    size = states.abs()
    found, largest = rounded_fp8(states), size.amax(-1, keepdim=True)
    normal = size > largest / 14_000
    assert 0.3 < float(normal.float().mean()) < 0.9
    assert ((found - states).abs() <= size / 16)[normal].all()
    # Below, a unit is 2**-9 beside 224 or more.
    assert ((found - states).abs() <= largest * 2**-10 / 224)[~normal].all()
    codes, exponents = encode_fp8(states)
    assert int((codes & 0x7F).max()) == 0x7E
    # What a row stands for is a bfloat16, in which a model may compute.
    assert torch.equal(decode_fp8(codes, exponents, torch.bfloat16).float(), found)


@pytest.mark.parametrize(
    ("row", "exponent", "expected"),
    [
        ([0.0, -0.0], 1, [0.0, 0.0]),
        ([448.0, -1.0], 127, [448.0, -1.0]),
        ([449.0, 17.0], 128, [448.0, 16.0]),  # ties to even
        ([450.0, 19.0], 128, [448.0, 20.0]),
        ([1e-42, 0.0], 1, [1e-42, 0.0]),
    ],
)
def test_exponents_of_rows_in_fp8(row: list[float], exponent: int, expected: list[float]) -> None:
    states = torch.tensor(row)
    assert encode_fp8(states)[1] == exponent
    torch.testing.assert_close(rounded_fp8(states), torch.tensor(expected), rtol=0, atol=1e-42)


def test_what_is_not_finite_spoils_its_row_in_fp8_alone() -> None:
    states = torch.ones(4, 2, 8)
    states[0, 0], states[1, 1, 3], states[2, 0, 5] = 0, torch.nan, -torch.inf
    spoilt = torch.zeros(4, 2, dtype=torch.bool)
    spoilt[1, 1] = spoilt[2, 0] = True
    found = rounded_fp8(states)
    assert torch.equal(~found.isfinite().any(-1), spoilt)
    assert torch.equal(found[~spoilt], states[~spoilt])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_attention_is_that_of_the_rounded_numbers(
    shape: str, option: str, dtype: torch.dtype
) -> None:
    heads, options = SHAPES[shape], OPTIONS[option]
    for name, block_size in zip(SETS, (16, 5, 32, 1), strict=False):
        subject = program(heads, dtype, name, block_size, int8=True, **options)
        tables = [blocks(which, block_size) for which in range(3)]
        q, k, v = split(table(heads, dtype).float(), heads)
        wanted = {**options, "sinks": sinks(heads)} if "sinks" in options else options
        expected = reference(q, rounded(k), rounded(v), heads.key_dim**-0.5, **wanted)
        first = [Span(range(90), 0, tables[0]), Span(range(37), 0, tables[1])]
        second = [
            Span([37], 37, tables[1]), Span(range(90, 95), 90, tables[0]),
            Span(range(21), 0, tables[2]),
        ]  # fmt: skip
        found = subject.step(first, window=options.get("window"))
        compare(found, torch.cat([expected[:90], expected[:37]]), dtype)
        found = subject.step(second, window=options.get("window"))
        compare(found, torch.cat([expected[37:38], expected[90:95], expected[:21]]), dtype)


@pytest.mark.parametrize("name", SETS)
def test_native_bits_do_not_depend_on_chunks_neighbours_or_threads(name: str) -> None:
    shape, tables = SHAPES["gqa"], [blocks(which, 16) for which in range(2)]

    def all_rows(chunks: list[int], *, others: bool = False, threads: int = 2) -> Tensor:
        subject, done, found = program(shape, torch.bfloat16, name, int8=True), 0, []
        for size in chunks:
            spans = [Span(range(done, done + size), done, tables[0])]
            if others:
                spans.append(Span(range(11), 0, tables[1]))
            found.append(subject.step(spans, threads=threads)[:size])
            done += size
        return torch.cat(found)

    whole = all_rows([LENGTH])
    assert torch.equal(all_rows([1] * LENGTH), whole)
    assert torch.equal(all_rows([7, 64, LENGTH - 71], others=True, threads=1), whole)


@pytest.mark.parametrize("name", SETS)
def test_native_codes_and_scales_are_those_of_torch(name: str) -> None:
    shape = SHAPES["unequal"]
    subject = program(shape, torch.float32, name, int8=True)
    subject.step([Span(range(LENGTH), 0, range(-(-LENGTH // 16)))])
    _, k, v = split(table(shape, torch.float32), shape)
    for cache, states in zip(subject.caches[0], (k, v), strict=True):
        wide = -(-states.shape[-1] // 16) * 16 if states is v else states.shape[-1]
        groups = cache[: -(-LENGTH // 16), :, 0].flatten(2)  # [blocks, heads, bytes]
        codes, scales = groups.split([wide * 16, 32], dim=-1)
        codes = codes.unflatten(-1, (wide, 16) if states is k else (16, wide))
        codes = codes.permute(0, 3, 1, 2) if states is k else codes.permute(0, 2, 1, 3)
        found = torch.cat(
            [codes[..., : states.shape[-1]], scales.unflatten(-1, (16, 2)).permute(0, 2, 1, 3)], -1
        ).flatten(0, 1)[:LENGTH]
        assert torch.equal(found, encode_kv(states))


@pytest.mark.parametrize("number_format", ["int8", "fp8"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_attention_is_that_of_the_rounded_numbers(
    shape: str, option: str, number_format: str
) -> None:
    heads, options = SHAPES[shape], dict(OPTIONS[option])
    if "sinks" in options:
        options["sinks"] = sinks(heads)
    q, k, v = split(table(heads, torch.float32), heads)
    known = rounded if number_format == "int8" else rounded_fp8
    expected = reference(q, known(k), known(v), heads.key_dim**-0.5, **options)
    layout = KVLayout.TOKENS.in_format(number_format)
    dtype = layout.stored_dtype(torch.float32)
    caches = [
        torch.full((30, *shape), 255).to(dtype)  # as a number it is not finite
        for shape in (
            layout.key_shape(5, heads.kv_heads, heads.key_dim, dtype),
            layout.value_shape(5, heads.kv_heads, heads.value_dim),
        )
    ]
    done, workspace = 0, AttentionWorkspace()
    for size in (90, 1, LENGTH - 91):
        rows = slice(done, done + size)
        batch = _batch(size, done + size, options)
        write_kv(k[rows], v[rows], *caches, batch.slots, block_size=5)
        found = paged_attention(
            q[rows], *caches, batch, scale=heads.key_dim**-0.5, workspace=workspace, **options
        )
        compare(found, expected[rows], torch.float32)
        done += size


def _batch(rows: int, length: int, options: dict[str, Any]) -> RaggedBatch:
    return RaggedBatch.from_lists(
        [rows], [length], [list(range(26))], block_size=5, window=options.get("window")
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_stores_and_attends_to_fp8_as_a_cpu_does(shape: str, dtype: torch.dtype) -> None:
    heads, found = SHAPES[shape], {}
    q, k, v = split(table(heads, dtype), heads)
    for device in ("cpu", "cuda"):
        batch = RaggedBatch.from_lists(
            [LENGTH], [LENGTH], [list(range(26))], block_size=5, device=torch.device(device)
        )
        caches = [
            torch.zeros(30, heads.kv_heads, 5 * (dim + 1), dtype=torch.uint8, device=device)
            for dim in (heads.key_dim, heads.value_dim)
        ]
        write_kv(k.to(device), v.to(device), *caches, batch.slots, block_size=5)
        out = paged_attention(q.to(device), *caches, batch, scale=heads.key_dim**-0.5)
        found[device] = [tensor.cpu() for tensor in (out, *caches)]
    assert torch.equal(found["cuda"][1], found["cpu"][1])
    assert torch.equal(found["cuda"][2], found["cpu"][2])
    compare(found["cuda"][0], found["cpu"][0].float(), dtype)


def test_a_cache_tells_what_it_holds() -> None:
    for layout, block_size in (
        (KVLayout.TOKENS, 5),
        (KVLayout.TOKENS_INT8, 5),
        (KVLayout.HEADS_FP8, 5),
    ):
        dtype = layout.stored_dtype(torch.bfloat16)
        cache = torch.zeros(7, *layout.key_shape(block_size, 3, 12, dtype), dtype=dtype)
        assert CacheShape.of(cache, block_size) == (7, block_size, 3, 12)
    with pytest.raises(ValueError, match=r"uint8 with blocks of 4 tokens cannot be \[7, 3, 65\]"):
        CacheShape.of(cache, 4)
    with pytest.raises(ValueError, match="groups has no form in fp8"):
        KVLayout.GROUPS.in_format("fp8")

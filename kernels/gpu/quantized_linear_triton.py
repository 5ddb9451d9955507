"""The Triton kernel of ``quantized_linear``: one program computes a tile of the output."""

# A kernel's parameters are Triton's values, not Python's: no annotation would say anything true.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_OUTPUTS = 64
_MOST_ROWS = 64
_MOST_INPUTS = 64


@triton.jit
def quantized_linear_kernel(
    out,
    x,
    codes,
    scales,
    offsets,
    values,
    rows,
    outputs,
    inputs,
    groups,
    code_bytes,
    x_stride,
    GROUP: tl.constexpr,  # inputs of a group, a multiple of TILE_INPUTS
    FOUR_BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Compute one tile: ``program_id(0)`` counts rows, ``program_id(1)`` outputs."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    column = tl.arange(0, TILE_INPUTS)
    # int64: output * code_bytes passes 2**31 in a large output layer.
    code_row = codes + output[:, None].to(tl.int64) * code_bytes
    total = tl.zeros((TILE_ROWS, TILE_OUTPUTS), dtype=tl.float32)
    for begin in range(0, inputs, TILE_INPUTS):
        k = begin + column
        here = (output[:, None] < outputs) & (k[None, :] < inputs)
        if FOUR_BITS:
            byte = tl.load(code_row + (k // 2)[None, :], mask=here, other=0)
            code = (byte.to(tl.int32) >> ((k % 2) * 4)[None, :]) & 15
        else:
            code = tl.load(code_row + k[None, :], mask=here, other=0).to(tl.int32)
        group = begin // GROUP
        scale = tl.load(scales + output * groups + group, mask=output < outputs, other=0.0)
        weight = tl.load(values + code) * scale[:, None]
        if HAS_OFFSETS:
            offset = tl.load(offsets + output * groups + group, mask=output < outputs, other=0.0)
            weight += offset[:, None]
        weight = tl.where(here, weight, 0.0)
        activations = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < inputs),
            other=0.0,
        )
        weight = weight.to(activations.dtype)
        total = tl.dot(activations, tl.trans(weight), total, input_precision="ieee")
    place = row[:, None].to(tl.int64) * outputs + output[None, :]
    inside = (row[:, None] < rows) & (output[None, :] < outputs)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def constants(rows: int, group: int, inputs: int, *, bits: int, offsets: bool) -> dict[str, int]:
    """The kernel's compile-time arguments."""
    whole = triton.next_power_of_2(inputs) if group >= inputs else group
    return {
        "GROUP": whole,
        "FOUR_BITS": bits == 4,
        "HAS_OFFSETS": offsets,
        "TILE_ROWS": max(16, min(_MOST_ROWS, triton.next_power_of_2(rows))),
        "TILE_OUTPUTS": _TILE_OUTPUTS,
        "TILE_INPUTS": max(16, min(_MOST_INPUTS, whole)),
    }


def quantized_linear_triton(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    *,
    bits: int,
    group: int,
) -> Tensor:
    """``x @ weight.T`` for x ``[rows, inputs]``; the rest are fields of ``PackedWeight``."""
    rows, inputs = x.shape
    outputs = scales.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    chosen = constants(rows, group, inputs, bits=bits, offsets=offsets is not None)
    if rows == 0:
        return out
    grid = (triton.cdiv(rows, chosen["TILE_ROWS"]), triton.cdiv(outputs, _TILE_OUTPUTS))
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        quantized_linear_kernel[grid](
            out,
            x,
            codes,
            scales,
            scales if offsets is None else offsets,
            values,
            rows,
            outputs,
            inputs,
            scales.shape[1],
            codes.shape[1],
            x.stride(0),
            **chosen,
        )
    return out
